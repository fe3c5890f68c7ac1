import json
import random

import pytest

from lit_rl.data import Arithmetic, PromptCursor, fingerprint


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    cursor = PromptCursor(10, seed=7)
    first, second = cursor.next(10), cursor.next(10)
    assert sorted(first) == sorted(second) == list(range(10))
    assert len({tuple(first), tuple(second), tuple(range(10))}) == 3


# O38: ten batches over two epochs, stopped after three and resumed by a new process.
def test_a_resumed_walk_equals_the_uninterrupted_one() -> None:
    whole = PromptCursor(10, seed=7)
    batches = [whole.next(2) for _ in range(10)]

    stopped = PromptCursor(10, seed=7)
    assert [stopped.next(2) for _ in range(3)] == batches[:3]
    state = json.loads(json.dumps(stopped.state_dict()))
    assert (state["epoch"], state["position"]) == (0, 6)
    random.seed(123)  # the global generator has no part in it
    resumed = PromptCursor(10, seed=7)
    resumed.load_state_dict(state)
    assert [resumed.next(2) for _ in range(7)] == batches[3:]


def test_the_walk_does_not_depend_on_the_size_of_the_steps() -> None:
    by_three, at_once = PromptCursor(10, seed=7), PromptCursor(10, seed=7)
    assert sum((by_three.next(3) for _ in range(12)), []) == at_once.next(36)
    assert by_three.state_dict() == at_once.state_dict()


def test_a_step_may_be_longer_than_the_data() -> None:
    assert PromptCursor(3, shuffle=False).next(7) == [0, 1, 2, 0, 1, 2, 0]
    assert PromptCursor(1).next(4) == [0, 0, 0, 0]
    assert PromptCursor(3).next(0) == []


def test_an_end_of_epoch_survives_a_resume() -> None:
    cursor = PromptCursor(4, seed=1)
    cursor.next(4)
    resumed = PromptCursor(4, seed=1)
    resumed.load_state_dict(cursor.state_dict())
    assert (resumed.epoch, resumed.position) == (1, 0)
    assert resumed.next(5) == cursor.next(5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rows": 9}, "num_rows was 10 and is 9"),
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"fingerprint": "other"}, "fingerprint was 'rows' and is 'other'"),
    ],
)
def test_a_state_of_other_prompts_is_refused(settings: dict, message: str) -> None:
    state = PromptCursor(10, seed=1, fingerprint="rows").state_dict()
    with pytest.raises(ValueError, match=message):
        PromptCursor(**{"num_rows": 10, "seed": 1, "fingerprint": "rows", **settings}).load_state_dict(state)


def test_the_fingerprint_knows_content_and_order() -> None:
    rows = Arithmetic(num_rows=20, seed=1)
    assert fingerprint(rows) == fingerprint(Arithmetic(num_rows=20, seed=1))
    assert fingerprint(rows) != fingerprint(Arithmetic(num_rows=20, seed=2))
    assert PromptCursor.for_source(rows).state_dict()["fingerprint"] == fingerprint(rows)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="num_rows=0"):
        PromptCursor(0)
