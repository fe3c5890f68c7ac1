"""Programs scored by running them."""

import asyncio
import json

import pytest

from lit_rl.rewards import compute_score
from lit_rl.rewards.code_tests import compute_score as score_code
from lit_rl.tools.sandbox import SandboxUnavailable, run_python

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
RIGHT = "print(sum(map(int, input().split())))"


@pytest.fixture(autouse=True, scope="module")
def sandbox():
    try:
        asyncio.run(run_python("pass"))
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def fenced(code, language="python"):
    return f"Here it is:\n```{language}\n{code}\n```\n"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (fenced(RIGHT), 1.0),
        (fenced("a, b = map(int, input().split())\nprint(3)"), 0.5),
        (fenced("print(1/0)"), 0.0),
        (fenced("if"), 0.0),
        (fenced("print(0)") + fenced(RIGHT), 1.0),
        (fenced(RIGHT, "") + fenced("x", "text"), 1.0),
        (RIGHT, 0.0),
        ("", 0.0),
    ],
)
def test_the_share_of_passed_cases_of_the_last_program(response, score):
    result = compute_score("apps", response, json.dumps(SUMS))
    assert result["score"] == score
    assert result["acc"] == (score == 1.0)
    assert result["has_code"] == ("```" in response)


def test_functions_and_methods_are_called_with_the_arguments():
    tests = {"fn_name": "add", "inputs": ["1\n2", [3, 4]], "outputs": ["3", [7]]}
    assert score_code(fenced("def add(a, b):\n    print('noise')\n    return a + b"), tests)["score"] == 1.0
    method = "class Solution:\n    def add(self, a, b):\n        return a - b"
    assert score_code(fenced(method), tests)["score"] == 0.0


def test_assertions_pass_only_if_they_are_reached():
    tests = {"assert_case": ["assert f(2) == 4", "assert f(3) == 9"]}
    assert score_code(fenced("def f(x): return x * x"), tests)["acc"] == 1.0
    assert score_code(fenced("def f(x): return 4"), tests)["score"] == 0.5
    assert score_code(fenced("import sys\nsys.exit(0)"), tests)["score"] == 0.0


def test_endless_programs_are_counted_as_such():
    result = score_code(fenced("while True: pass"), SUMS, wall_s=0.5)
    assert result == {"score": 0.0, "acc": 0.0, "has_code": 1.0, "timeout_share": 1.0}


def test_only_the_first_cases_are_run():
    many = {"inputs": ["1 2"] * 30, "outputs": ["3"] + ["no"] * 29}
    assert score_code(fenced(RIGHT), many, max_tests=2)["score"] == 0.5


def test_scoring_works_inside_a_running_event_loop():
    async def main():
        return score_code(fenced(RIGHT), SUMS)

    assert asyncio.run(main())["score"] == 1.0


@pytest.mark.parametrize("tests", [{}, {"inputs": ["1"], "outputs": []}, "[1]"])
def test_cases_that_cannot_be_read_are_an_error(tests):
    with pytest.raises(ValueError, match="ground_truth"):
        score_code(fenced(RIGHT), tests)
