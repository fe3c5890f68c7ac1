from __future__ import annotations

import random

from lit_rl.data import ConversationTokens, PromptCursor
from lit_rl.experience.conversations import ConversationLoader
from lit_rl.experience.progress import PhaseProgress


def make_rows(count: int) -> list[ConversationTokens]:
    rng = random.Random(5)
    rows = []
    for index in range(count):
        length = rng.randint(2, 12)
        mask = [rng.randint(0, 1) for _ in range(length - 1)] + [1]
        prompt = [1] * rng.randint(1, 6)
        rows.append(ConversationTokens(row_id=str(index), prompt_ids=prompt, response_ids=[2] * length, loss_mask=mask))
    return rows


def make_loader(rows, cursor, *, batch_size=4, num_steps=None, **more) -> ConversationLoader:
    return ConversationLoader(
        rows, cursor, batch_size=batch_size, num_steps=num_steps, max_tokens=40, phase=PhaseProgress(), **more
    )


def rows_by_step(loader: ConversationLoader) -> list[list[str]]:
    return [
        [batch.rows[i].row_id for bins in batch.plan.micro_batches for one in bins for i in one] for batch in loader
    ]


def test_an_iteration_is_a_pass_in_even_steps_or_a_number_of_steps() -> None:
    rows = make_rows(10)
    cursor = PromptCursor.for_source(rows, seed=3)

    a_pass = rows_by_step(make_loader(rows, cursor))
    assert sorted(len(step) for step in a_pass) == [3, 3, 4]
    assert sorted(sum(a_pass, [])) == sorted(row.row_id for row in rows)
    assert rows_by_step(make_loader(rows, cursor)) != a_pass  # another order each pass

    steps = rows_by_step(make_loader(rows, cursor, num_steps=5))
    assert [len(step) for step in steps] == [4] * 5  # over the end of a pass
    assert (cursor.epoch, cursor.position) == (4, 0)


def test_the_order_follows_from_the_seed_and_is_taken_up_again() -> None:
    rows = make_rows(11)
    whole = PromptCursor.for_source(rows, seed=3)
    first, second = (rows_by_step(make_loader(rows, whole, num_steps=2)) for _ in range(2))

    again = PromptCursor.for_source(rows, seed=3)
    assert rows_by_step(make_loader(rows, again, num_steps=2)) == first
    resumed = PromptCursor.for_source(rows, seed=3)
    resumed.load_state_dict(again.state_dict())
    assert rows_by_step(make_loader(rows, resumed, num_steps=2)) == second


def test_ranks_share_a_step_and_its_count_of_tokens() -> None:
    rows = make_rows(9)
    shares = [list(make_loader(rows, PromptCursor.for_source(rows), world_size=2, rank=rank)) for rank in range(2)]

    for ours, theirs in zip(*shares, strict=True):
        packed = [list(batch.micro_batches()) for batch in (ours, theirs)]
        assert len(packed[0]) == len(packed[1])  # collective calls match
        learned = sum(int(micro.loss_mask.sum()) for one in packed for micro, _ in one)
        assert learned == ours.plan.num_loss_tokens == theirs.plan.num_loss_tokens
        assert all(micro.packed.num_tokens <= 40 for one in packed for micro, _ in one)


def test_validation_takes_every_row_once_in_order() -> None:
    rows = make_rows(10)

    steps = rows_by_step(make_loader(rows, None, batch_size=4))

    assert [sorted(step, key=int) for step in steps] == [list("0123"), list("456"), list("789")]
