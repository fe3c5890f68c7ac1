from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lit_rl.rewards import OverlongShaping, compute_score, has_scorer, merge_reward_parts, normalize_reward_return
from lit_rl.rewards.result import MAX_ERROR_CHARS, error_text
from lit_rl.rewards.score import check_data_sources


@pytest.mark.parametrize(
    ("returned", "score"),
    [(np.float32(0.5), 0.5), (True, 1.0), (1, 1.0), (np.array(0.25), 0.25), (np.bool_(True), 1.0)],
)
def test_every_kind_of_number_is_a_score(returned: Any, score: float) -> None:  # O30
    result = normalize_reward_return(returned, "f", "row-1")
    assert result.score == score
    assert type(result.score) is float
    assert (result.parts, result.error) == ({}, None)


@pytest.mark.parametrize("returned", ["0.5", [1.0, 2.0], {}, None, math.nan, math.inf, np.array([0.5]), {"score": "1"}])
def test_anything_else_is_an_error_that_names_function_and_row(returned: Any) -> None:  # O30
    result = normalize_reward_return(returned, "my_reward", "row-1")
    assert result.score is None
    assert "my_reward, row row-1" in (result.error or "")


def test_dicts_with_different_keys_are_averaged_over_those_that_have_them() -> None:  # O29
    returned: list[Any] = [{"score": 1, "acc": 1}, 0.5, {"score": 0, "fmt": 1}, {"score": 1, "acc": 0}]
    results = [normalize_reward_return(value, "f", str(i)) for i, value in enumerate(returned)]
    assert [result.score for result in results] == [1.0, 0.5, 0.0, 1.0]
    merged = merge_reward_parts(result.parts for result in results)
    assert merged == {"acc": (0.5, 2), "fmt": (1.0, 1)}
    assert merge_reward_parts(result.parts for result in reversed(results)) == merged


def test_dict_without_score_names_function_row_and_keys() -> None:  # O29
    error = normalize_reward_return({"acc": 1}, "my_reward", "row-7").error or ""
    assert "my_reward, row row-7" in error
    assert "'score'" in error
    assert "['acc']" in error


def test_values_that_are_no_numbers_are_kept_as_text_beside_the_parts() -> None:
    result = normalize_reward_return(
        {"score": 1, "pred": "12", "acc": None, "gap": math.nan, "n": np.int64(3)}, "f", "r"
    )
    assert result.parts == {"n": 3.0}
    assert result.notes == {"pred": "12", "acc": "None", "gap": "nan"}
    assert normalize_reward_return({"score": 1, "text": "x" * 5000}, "f", "r").notes == {"text": "x" * 1000}


@pytest.mark.parametrize(("num_tokens", "penalty"), [(4000, 0.0), (4608, -0.5), (5120, -1.0)])
def test_overlong_penalty_is_the_one_of_dapo(num_tokens: int, penalty: float) -> None:  # contracts 9.4
    shaping = OverlongShaping(buffer_tokens=1024, max_response_tokens=5120, penalty_factor=1.0)
    assert shaping.penalty(num_tokens) == penalty


def test_traceback_is_bounded_and_keeps_the_error_itself() -> None:
    def recurse(depth: int) -> None:
        if depth == 0:
            raise KeyError("the " + "very " * 500 + "end")
        recurse(depth - 1)

    with pytest.raises(KeyError) as caught:
        recurse(50)
    text = error_text(caught.value)
    assert len(text) < MAX_ERROR_CHARS + 100
    assert text.startswith("Traceback")
    assert text.endswith("end'")


def test_arithmetic_is_dispatched_by_data_source() -> None:
    both = {"well_formed": 1.0, "complete": 1.0}
    assert has_scorer("arithmetic")
    assert compute_score("arithmetic", "12", "12") == {
        "score": 1.0, "acc": 1.0, **both, "acc_if_well_formed": 1.0, "acc_if_complete": 1.0
    }  # fmt: skip
    assert compute_score("arithmetic", "5 + 7 = 12.", "12") == {
        "score": 1.0, "acc": 1.0, "well_formed": 0.0, "complete": 1.0, "acc_if_complete": 1.0
    }  # fmt: skip
    assert compute_score("arithmetic", "It is 5 + 7 = 12.", "12") == {
        "score": 1.0, "acc": 1.0, "well_formed": 0.0, "complete": 0.0
    }  # fmt: skip
    assert compute_score("arithmetic", "13", "12") == {
        "score": 0.0, "acc": 0.0, **both, "acc_if_well_formed": 0.0, "acc_if_complete": 0.0
    }  # fmt: skip
    assert compute_score("arithmetic", "", "12") == {"score": 0.0, "acc": 0.0, "well_formed": 0.0, "complete": 0.0}


@pytest.mark.parametrize(
    ("data_source", "right", "ground_truth"),
    [  # contracts 9.5
        ("openai/gsm8k", "so #### 18", "18"),
        ("lighteval/MATH", r"\boxed{18}", "18"),
        ("numina_olympiads", r"\boxed{18}", "18"),
        ("math_dapo", "Answer: 18", "18"),
        ("aime2024", "Answer: 18", "18"),
        ("hiyouga/geometry3k", r"<think>x</think> \boxed{18}", "18"),
        ("multiple_choice", "Answer: B", "B"),
        ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris"]}),
    ],
)
def test_data_source_finds_its_scorer(data_source: str, right: str, ground_truth: Any) -> None:
    for answer, score in [(right, 1.0), ("no idea", 0.0)]:
        result = normalize_reward_return(compute_score(data_source, answer, ground_truth), data_source, "row")
        assert result.error is None
        # DAPO's mathematics scores a wrong answer with -1.
        assert result.score == (score or (-1.0 if data_source in ("math_dapo", "aime2024") else 0.0))


def test_data_source_without_scorer_is_named() -> None:
    assert not has_scorer("my/own")
    with pytest.raises(ValueError, match=r"data_source 'my/own'.*data\.rewards\.function"):
        compute_score("my/own", "", "")
    with pytest.raises(ValueError, match="'a', 'my/own'"):
        check_data_sources(["arithmetic", "my/own", "a", "a"])
