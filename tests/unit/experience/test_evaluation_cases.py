"""Validation dealt to ranks with unequal shares: every rank reports the mean over rows, not over ranks or copies."""

from __future__ import annotations

import pytest

from lit_rl.experience.evaluation import EvaluationBatch
from lit_rl.types import Trajectory


def scored(row: int, reward: float) -> Trajectory:
    return Trajectory(
        row_id=f"row {row}", group_id=f"val:{row}", prompt_ids=[1], response_ids=[2], loss_mask=[1],
        rollout_logprobs=[0.0], policy_versions=[0], reward=reward,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rewards", "world_size", "shares", "mean"),
    [
        # O50: rank 0 has 0, 0.5 and 1 (mean 0.5), rank 1 twice 1; the unweighted mean of ranks would be 0.75.
        ([0.0, 1.0, 0.5, 1.0, 1.0], 2, [3, 2], 0.7),
        # O50: rank 1 has none.
        ([0.5], 2, [1, 0], 0.5),
        # O37: on four ranks copies that fill up the last round would give 0.875.
        ([1.0, 1.0, 1.0, 1.0, 0.0], 4, [2, 1, 1, 1], 0.8),
        # O36: more ranks than rows.
        ([1.0, 0.0, 0.0], 5, [1, 1, 1, 0, 0], 1 / 3),
    ],
)
def test_every_rank_reports_the_mean_over_rows(rewards, world_size, shares, mean) -> None:
    batches = EvaluationBatch.deal("s", [scored(row, reward) for row, reward in enumerate(rewards)], world_size)

    assert [len(batch.trajectories) for batch in batches] == shares
    assert sorted(t.row_id for batch in batches for t in batch.trajectories) == [
        f"row {n}" for n in range(len(rewards))
    ]
    for batch in batches:
        assert batch.metrics["val-core/s/reward/mean@1"] == pytest.approx(mean)
