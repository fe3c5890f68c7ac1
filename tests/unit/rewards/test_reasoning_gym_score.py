import pytest

from lit_rl.data import ReasoningGym
from lit_rl.rewards import compute_score, has_scorer


@pytest.fixture(scope="module")
def row():
    pytest.importorskip("reasoning_gym")
    return ReasoningGym("chain_sum", num_rows=3)[0]


def test_the_last_answer_block_is_graded_by_the_task(row):
    def score(text):
        return compute_score(row.data_source, text, row.ground_truth, row.extra_info)

    right = {"score": 1.0, "acc": 1.0}
    assert score(f"<think>3 + 4</think><answer>1</answer> no, <answer> {row.ground_truth} </answer>") == right
    assert score(f" {row.ground_truth}\n") == right
    assert score("<answer>no idea</answer>")["acc"] == 0.0
    assert score("")["score"] == 0.0
    # The task itself grades an answer with words around it lower.
    assert 0.0 < score(f"<answer>it is {row.ground_truth}</answer>")["score"] < 1.0


def test_rows_of_another_making_are_an_error_not_a_zero():
    assert has_scorer("reasoning_gym/countdown")
    with pytest.raises(ValueError, match=r"needs 'task' and 'entry'.*\['index'\]"):
        compute_score("reasoning_gym/countdown", "5", "5", {"index": 1})
