"""Scorers of GSM8K, MATH, DAPO-math, Geometry3K, multiple choice, and DAPO's length penalty."""

import threading

import pytest

from lit_rl.data.latex_answers import last_boxed, normalize_latex
from lit_rl.rewards import geo3k, gsm8k, math, math_dapo, multiple_choice
from lit_rl.rewards.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so #### 1,234", 1.0),
        ("#### $1234.", 1.0),
        ("#### 5 then #### 1234", 1.0),
        ("#### 1234 then #### 5", 0.0),
        ("the answer is 1234", 0.0),
        ("#### 1234" + "x" * 400, 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_wants_the_last_number_after_four_hashes(response, score):
    assert gsm8k.compute_score(response, "1234") == score


def test_gsm8k_flexible_takes_the_last_number():
    assert gsm8k.compute_score("it is 3, or -18.", "-18", method="flexible") == 1.0
    assert gsm8k.compute_score("#### 4", 5, format_score=0.1) == 0.1


@pytest.mark.parametrize(
    ("response", "golden", "score"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
        (r"so $\boxed{\dfrac{1}{2}}$", "0.5", 1.0),
        (r"\boxed{1/2}", r"the sum is \boxed{\frac{1}{2}}", 1.0),
        (r"\boxed{2} no \boxed{3}", "3", 1.0),
        (r"\boxed{x = 5}", "5", 1.0),
        (r"\boxed{10{,}000}", "10,000", 1.0),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{\text{Evelyn}}", "Evelyn", 1.0),
        (r"\boxed{4}", "5", 0.0),
        (r"\boxed{{{", "5", 0.0),
        ("5", "5", 0.0),
        (r"\boxed{\frac{}{}}", "5", 0.0),
    ],
)
def test_math_compares_boxed_answers_by_meaning(response, golden, score):
    assert math.compute_score(response, golden) == score


def test_math_scores_the_same_off_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(math.compute_score(r"\boxed{0.5}", r"\frac{1}{2}")))
    thread.start()
    thread.join(30)
    assert scores == [1.0]


def test_the_last_box_is_found_with_its_braces():
    assert last_boxed(r"a \boxed{\frac{1}{2}} b \fbox{x_{1}} c") == "x_{1}"
    assert last_boxed(r"\boxed 7 and") == "7"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1") is None
    assert normalize_latex(r"\tfrac{3}{4}\text{ cm}^2.") == r"\frac{3}{4}^2"


def test_dapo_math_reads_the_answer_line():
    assert math_dapo.compute_score("Answer: 34", "34") == {"score": 1.0, "acc": 1.0, "pred": "34"}
    assert math_dapo.compute_score("Answer: 3\nAnswer: $34$", 34)["score"] == 1.0
    assert math_dapo.compute_score(r"thus \boxed{34}", "34")["acc"] == 1.0
    assert math_dapo.compute_score("34", "34") == {"score": -1.0, "acc": 0.0, "pred": ""}


def test_geometry_gives_a_tenth_for_the_form():
    assert geo3k.compute_score(r"<think>x</think> \boxed{5}", "5")["score"] == pytest.approx(1.0)
    assert geo3k.compute_score(r"\boxed{5}", "5")["score"] == pytest.approx(0.9)
    assert geo3k.compute_score(r"<think>x</think> \boxed{6}", "5")["score"] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{(b)}}", "B"),
        ("A or B? <answer>B</answer>", "B"),
        ("Answer: D", "D"),
        ("The answer is **(A)**.", "A"),
        ("Answer: A. No, the answer is B.", "B"),
        ("Hm.\nC\n", "C"),
        ("A cat sat.", None),
        ("the answer is A's", None),
        ("the answer is a long story", None),
        ("", None),
    ],
)
def test_the_letter_a_response_commits_to(response, choice):
    assert multiple_choice.extract_choice(response) == choice


def test_multiple_choice_accepts_letter_position_and_text():
    choices = {"choices": ["red", "green"]}
    for truth, info in (("B", None), ("(b)", None), (1, None), (1, choices), ("green", choices)):
        assert multiple_choice.compute_score("Answer: B", truth, info) == 1.0
    assert multiple_choice.compute_score("Answer: A", "B") == 0.0
    for truth in ("blue", 7, None):
        with pytest.raises(ValueError, match="names no choice"):
            multiple_choice.compute_score("Answer: B", truth, choices)


@pytest.mark.parametrize(("length", "penalty"), [(4000, 0.0), (4096, 0.0), (4608, -0.5), (5120, -1.0)])
def test_the_overlong_penalty_grows_over_the_buffer(length, penalty):
    assert overlong_penalty(length, max_response_tokens=5120, buffer_tokens=1024) == penalty
    assert overlong_penalty(length, max_response_tokens=5120, buffer_tokens=1024, penalty_factor=2.0) == 2 * penalty


@pytest.mark.parametrize("buffer", [0, 101])
def test_an_overlong_buffer_out_of_range_is_refused(buffer):
    with pytest.raises(ValueError, match="max_response_tokens=100"):
        overlong_penalty(5, max_response_tokens=100, buffer_tokens=buffer)
