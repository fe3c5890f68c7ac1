"""The corpus of real facts: what it holds, what is held out, and that it is the same every time."""

import hashlib
import json
import random

import pyarrow.parquet
import pytest
from corpus import draw, write_corpus
from facts import ONE_HOP, build_world

from lit_rl.data import PromptFiles
from lit_rl.rewards.score import check_data_sources
from lit_rl.rewards.search_r1_em import normalize_answer

FILES = ("train", "train_two_hop", "check", "check_two_hop", "test", "test_two_hop", "test_no_tool")


@pytest.fixture(scope="module")
def world():
    return build_world()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    return folder


def test_there_are_five_thousand_passages_and_each_answers_its_questions(world):
    assert len(world.passages) >= 5000
    assert {question.attribute for question in world.questions} >= set(ONE_HOP)
    for question in world.questions:
        last = world.passages[question.passages[-1]]
        assert question.answer in last.text
        assert question.entity in question.text
        assert normalize_answer(question.answer)


def test_two_hop_questions_need_the_country_and_one_hop_questions_do_not(world):
    for question in world.questions:
        first = world.passages[question.passages[0]]
        assert first.title == question.entity
        if question.num_hops == 2:
            country = world.passages[question.passages[1]].title
            assert f"is a city in {country}." in first.text
            assert country not in question.text
            assert question.queries[1].count(country) == 1
            assert question.answer not in first.text


def test_nothing_about_a_held_out_country_is_asked_in_training(world):
    held_out = {q.entity for q in world.questions if q.attribute == "capital" and q.is_held_out}
    assert len(held_out) > 50
    for question in world.questions:
        # Cities and regions of these countries answer with their name, two-hop questions search for them.
        touches = question.answer in held_out and question.attribute in ("city_country", "region_country")
        touches |= any(world.passages[number].title in held_out for number in question.passages)
        if touches:
            assert question.is_held_out, question


def test_entities_of_training_and_test_are_apart_and_no_question_is_asked_twice(folder):
    questions = {
        name: [
            row["extra_info"]["question"] for row in pyarrow.parquet.read_table(folder / f"{name}.parquet").to_pylist()
        ]
        for name in FILES
    }
    warmup = [json.loads(line)["question"] for line in (folder / "warmup_questions.jsonl").read_text().splitlines()]
    for asked in (*questions.values(), warmup):
        assert len(set(asked)) == len(asked)
    trained = {*questions["train"], *questions["train_two_hop"]}
    checked = {*questions["check"], *questions["check_two_hop"]}
    assert not trained & set(warmup)
    assert not checked & (trained | set(warmup))
    assert not (trained | checked | set(warmup)) & {*questions["test"], *questions["test_two_hop"]}
    assert questions["test_no_tool"] == questions["test"]
    assert len(questions["test"]) == 200


def test_rows_are_prompts_with_a_scorer_and_the_shares_of_hops_asked_for(folder):
    for name, num_two_hop in (("test", 40), ("test_two_hop", 100)):
        prompts = PromptFiles([folder / f"{name}.parquet"])
        sources = [prompts[index].data_source for index in range(len(prompts))]
        check_data_sources(sources)
        assert sources.count("searchR1_geo_two_hop") == num_two_hop
        assert sources.count("searchR1_geo_one_hop") == 200 - num_two_hop
        create = prompts[0].extra_info["tools_kwargs"]["search"]["create_kwargs"]
        assert create["ground_truth"] == prompts[0].ground_truth
        assert create["data_source"] == prompts[0].data_source
    no_tool = PromptFiles([folder / "test_no_tool.parquet"])[0]
    assert (no_tool.agent_name, no_tool.data_source) == ("single_turn_agent", "searchR1_geo_no_tool")


def test_the_same_seed_writes_the_same_files_and_another_one_others(folder, tmp_path):
    for name, seed in (("again", 0), ("other", 1)):
        write_corpus(tmp_path / name, seed)
    digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest()  # noqa: E731
    for path in sorted(folder.iterdir()):
        assert digest(path) == digest(tmp_path / "again" / path.name), path.name
        assert digest(path) != digest(tmp_path / "other" / path.name), path.name


def test_a_corpus_line_is_a_quoted_title_and_a_text(folder):
    rows = [json.loads(line) for line in (folder / "corpus.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [str(number) for number in range(len(rows))]
    title, text = rows[0]["contents"].split("\n")
    assert title == '"Andorra"'
    assert text.startswith("Andorra is a country in Europe.")


def test_questions_are_drawn_evenly_by_attribute(world):
    drawn = draw([q for q in world.questions if not q.is_held_out], random.Random(0), 150, two_hop_share=0.0)
    counts = [sum(q.attribute == attribute for q in drawn) for attribute in ONE_HOP]
    assert counts == [10] * len(ONE_HOP)


def test_too_few_questions_are_refused(world):
    with pytest.raises(ValueError, match="20000 are asked for"):
        draw(world.questions, random.Random(0), 20000, two_hop_share=0.0)
