"""The dataloader of an iteration: sized, lazy, and exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lit_rl.experience.batch import Experience
from lit_rl.experience.loader import ExperienceLoader
from lit_rl.experience.plan import plan_iteration
from lit_rl.types import Trajectory


def collector(calls: list[int], *, size: int, ppo_epochs: int, num_mini_batches: int) -> Callable[[], Experience]:
    def collect() -> Experience:
        calls.append(len(calls))
        trajectories = [
            Trajectory(
                row_id=str(i), group_id=str(i), prompt_ids=[1], response_ids=[2], loss_mask=[1],
                rollout_logprobs=[0.0], policy_versions=[0], reward=1.0,
            )
            for i in range(size)
        ]  # fmt: skip
        return Experience(
            iteration=calls[-1], temperature=1.0,
            plan=plan_iteration([2] * size, 1, num_mini_batches, ppo_epochs, 10, seed=0),
            trajectories=trajectories, indices=range(size), rewards=torch.ones(size), group_ids=torch.arange(size),
            loss_tokens=torch.ones(size),
        )  # fmt: skip

    return collect


@pytest.mark.parametrize("size", [0, 1, 7])
@pytest.mark.parametrize(("ppo_epochs", "num_mini_batches"), [(1, 1), (2, 3)])
def test_a_pass_yields_exactly_as_many_mini_batches_as_its_length(
    size: int, ppo_epochs: int, num_mini_batches: int
) -> None:
    calls: list[int] = []
    collect = collector(calls, size=size, ppo_epochs=ppo_epochs, num_mini_batches=num_mini_batches)
    loader = ExperienceLoader(collect, ppo_epochs, num_mini_batches)

    batches = list(loader)

    assert len(loader) == len(batches) == ppo_epochs * num_mini_batches
    places = [(epoch, index) for epoch in range(ppo_epochs) for index in range(num_mini_batches)]
    assert [(batch.epoch, batch.index) for batch in batches] == places
    assert len({id(batch.experience) for batch in batches}) == 1


def test_nothing_is_collected_before_the_first_item_is_asked_for_and_then_once_per_pass() -> None:
    calls: list[int] = []
    loader = ExperienceLoader(collector(calls, size=4, ppo_epochs=1, num_mini_batches=2), 1, 2)

    assert len(loader) == 2
    first_pass = iter(loader)
    assert calls == []
    assert next(first_pass).experience.iteration == 0
    assert calls == [0]
    next(first_pass)
    assert calls == [0]
    assert [batch.experience.iteration for batch in loader] == [1, 1]
    assert calls == [0, 1]


def test_the_last_item_needs_no_work_afterwards() -> None:
    # Lightning never resumes a sized loader after its last item: all that a pass does is done by then.
    calls: list[int] = []
    for _ in range(2):
        items = iter(ExperienceLoader(collector(calls, size=2, ppo_epochs=1, num_mini_batches=1), 1, 1))
        assert next(items).is_last
    assert calls == [0, 1]
