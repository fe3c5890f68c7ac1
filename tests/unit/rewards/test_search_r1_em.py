"""Exact match under SQuAD's rule (contracts 8.4, cases O33 and O34)."""

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_rl.rewards.search_r1_em import (
    compute_score,
    compute_score_subem,
    em_check,
    extract_solution,
    normalize_answer,
    normalize_answer_unicode,
    subem_check,
)


@pytest.mark.parametrize(  # O33
    ("text", "normal"),
    [
        ("The Eiffel Tower.", "eiffel tower"),
        (" U.S.A ", "usa"),
        ("An apple a day", "apple day"),
        ("1,000", "1000"),
        ("1.5", "15"),  # the rule's known oddity
        ("The  Eiffel-Tower!", "eiffeltower"),
        ('an "A" grade', "grade"),
        ("the the", ""),
        ("“a” x", "“ ” x"),
    ],
)
def test_answers_are_normalized_as_squad_does(text, normal):
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(  # O33
    ("prediction", "golden"),
    [
        ("Beyonce", "Beyoncé"),
        ("New-York", "new york"),
        ("Paris, France", "Paris"),
        ("“Hamlet”", "Hamlet"),
        ("theatre", "the atre"),
    ],
)
def test_different_answers_do_not_match(prediction, golden):
    assert em_check(prediction, golden) == 0


@given(st.text(alphabet=string.printable + "éß“”İ the an a", max_size=40))
def test_the_fast_normaliser_equals_the_rule_as_it_is_written(text):
    lowered = "".join(c for c in text.lower() if c not in set(string.punctuation))
    assert normalize_answer(text) == " ".join(re.sub(r"\b(a|an|the)\b", " ", lowered).split())


def test_any_of_several_golds_counts_and_empty_ones_do_not():
    assert em_check("paris", ["Rome", "Paris!"]) == 1
    assert em_check("the", ["The"]) == 0
    assert subem_check("the city of Paris", ["Rome", "paris"]) == 1
    assert subem_check("anything", ["The", "..."]) == 0


@pytest.mark.parametrize(  # O34
    ("response", "answer"),
    [
        ("<think>x</think><answer>Paris</answer>", "Paris"),
        ("<answer>Rome</answer> no, <answer> Paris\n</answer>", "Paris"),
        ("<answer>Paris", None),
        ("", None),
        ("<answer>a<answer>b</answer> c</answer>", "a<answer>b"),
    ],
)
def test_the_last_complete_answer_counts(response, answer):
    assert extract_solution(response) == answer


def test_scores():
    truth = {"target": ["Paris"]}
    assert compute_score("<answer>paris</answer>", truth) == 1.0
    assert compute_score("<answer>Rome</answer>", truth) == 0.0
    assert compute_score("<answer>Rome</answer>", truth, format_score=0.1) == 0.1
    assert compute_score("Paris", truth, format_score=0.1) == 0.0
    assert compute_score("<answer>Paris</answer>" * 11, truth) == 0.25
    assert compute_score("<answer>Paris</answer>" * 10, truth, score=2.0) == 2.0
    assert compute_score_subem("<answer>in Paris</answer>", truth) == 1.0
    assert compute_score("<answer>in Paris</answer>", truth) == 0.0
    assert compute_score("<answer>Paris</answer>", {"target": "Paris"}) == 1.0


def test_the_unicode_variant_keeps_words_apart():
    assert normalize_answer_unicode("New-York") == normalize_answer_unicode("new york") == "new york"
    assert normalize_answer_unicode("“Hamlet”") == "hamlet"
    assert normalize_answer_unicode("１.5") == "1 5"
