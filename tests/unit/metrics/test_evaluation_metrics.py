"""Numbers of a validation: exact counts, one vote per row, and pass@k worked out by hand."""

from __future__ import annotations

import itertools

import pytest

from lit_rl.metrics.evaluation import best_at_k, evaluation_metrics, pass_at_k
from lit_rl.types import Trajectory


def sampled(row: int, reward: float | None, *, sample: int = 0, tokens: int = 2, **parts: float) -> Trajectory:
    return Trajectory(
        row_id=f"row {row}", group_id=f"val:{row}", sample_index=sample, prompt_ids=[1], response_ids=[2] * tokens,
        loss_mask=[1] * tokens, rollout_logprobs=[0.0] * tokens, policy_versions=[0] * tokens, reward=reward,
        reward_parts=parts, error="raised" if reward is None else None,
    )  # fmt: skip


# O36: ten rows, eight right; O37: five rows, four right; and three rows, fewer than any batch.
@pytest.mark.parametrize(("rewards", "mean"), [([1] * 8 + [0] * 2, 0.8), ([1, 1, 1, 1, 0], 0.8), ([1, 0, 0], 1 / 3)])
def test_the_mean_is_over_all_rows_each_once(rewards: list[float], mean: float) -> None:
    metrics = evaluation_metrics("sums", [sampled(row, reward) for row, reward in enumerate(rewards)])

    assert metrics["val-core/sums/reward/mean@1"] == pytest.approx(mean, abs=1e-12)
    assert metrics["val-aux/sums/failed_share"] == 0
    assert not [name for name in metrics if "pass@" in name]


def test_every_row_counts_once_however_many_samples_it_has() -> None:
    # Row 0: 1 and 0.5; row 1: one sample failed, the other has 0.
    metrics = evaluation_metrics("s", [sampled(0, 1.0), sampled(0, 0.5), sampled(1, 0.0), sampled(1, None)])

    assert metrics["val-core/s/reward/mean@2"] == 0.375
    assert metrics["val-aux/s/failed_share"] == 0.25


def test_a_metric_keeps_its_name_when_samples_fail() -> None:
    metrics = evaluation_metrics("s", [sampled(0, 1.0), sampled(0, None), sampled(1, 0.0), sampled(1, None)])

    assert metrics["val-core/s/reward/mean@2"] == 0.5
    assert "val-core/s/reward/pass@2" not in metrics  # no row has two samples left to draw


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer() -> None:
    # 4 samples, 1 right: of the 6 pairs 3 hold it. 2 right: 1 pair of 6 misses both.
    assert pass_at_k([1, 0, 0, 0], 2) == 0.5
    assert pass_at_k([1, 1, 0, 0], 2) == pytest.approx(5 / 6)
    assert pass_at_k([1, 1, 1, 0], 2) == 1.0
    assert pass_at_k([0, 0], 2) == 0.0
    assert pass_at_k([0.5, 0.51], 1) == 0.5


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_equals_counting_every_draw(k: int) -> None:
    rewards = [0.0, 1.0, 0.4, 0.9, 0.0]
    draws = list(itertools.combinations(rewards, k))

    assert pass_at_k(rewards, k) == pytest.approx(sum(max(draw) > 0.5 for draw in draws) / len(draws))


def test_pass_rates_are_averaged_over_rows_at_powers_of_two() -> None:
    rows = [[1, 0, 0, 0], [0, 0, 0, 0]]
    metrics = evaluation_metrics("s", [sampled(row, reward) for row, rewards in enumerate(rows) for reward in rewards])

    assert metrics["val-core/s/reward/mean@4"] == 0.125
    assert metrics["val-core/s/reward/pass@2"] == 0.25  # (1/2 + 0) / 2
    assert metrics["val-core/s/reward/pass@4"] == 0.5


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_at_k_equals_counting_every_draw(k: int) -> None:
    rewards = [0.3, -1.0, 0.4, 0.9, 0.3]
    draws = list(itertools.combinations(rewards, k))

    assert best_at_k(rewards, k) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_best_and_worst_are_averaged_over_rows_and_the_best_of_all_is_a_core_metric() -> None:
    rows = [[1.0, 0.0, 0.5, 0.5], [0.2] * 4]
    metrics = evaluation_metrics("s", [sampled(row, reward) for row, rewards in enumerate(rows) for reward in rewards])

    # Of the 6 pairs of the first row 3 hold the 1, and 3 the 0; the others have 0.5 as best and worst.
    assert metrics["val-aux/s/reward/best@2/mean"] == pytest.approx((0.75 + 0.2) / 2)
    assert metrics["val-aux/s/reward/worst@2/mean"] == pytest.approx((0.25 + 0.2) / 2)
    assert metrics["val-core/s/reward/best@4/mean"] == pytest.approx(0.6)
    assert metrics["val-aux/s/reward/worst@4/mean"] == pytest.approx(0.1)
    assert "val-core/s/reward/best@2/mean" not in metrics


# O29
def test_parts_are_averaged_over_the_trajectories_that_have_them() -> None:
    metrics = evaluation_metrics(
        "s",
        [
            sampled(0, 1.0, tokens=4, acc=1.0),
            sampled(1, 0.5),
            sampled(2, 0.0, acc=0.0, fmt=1.0),
            sampled(3, None, acc=9.0),
        ],
    )

    assert metrics["val-aux/s/acc/mean"] == 0.5
    assert metrics["val-aux/s/fmt/mean"] == 1.0
    assert metrics["val-aux/s/response_length/mean"] == pytest.approx(8 / 3)


def test_a_validation_in_which_everything_failed_says_only_that() -> None:
    assert evaluation_metrics("s", [sampled(0, None)]) == {"val-aux/s/failed_share": 1.0}
