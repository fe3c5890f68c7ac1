"""Numbers of a rollout against hand-worked ones."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from lit_rl.metrics.rollout import part_means, rollout_metrics
from lit_rl.types import Trajectory


def trajectory(
    reward: float | None = 1.0, tokens: int = 2, tools: int = 0, prompt: int = 3, **options: Any
) -> Trajectory:
    mask = [1] * tokens + [0] * tools
    return Trajectory(
        row_id="row", group_id="g", prompt_ids=[1] * prompt, response_ids=[2] * len(mask), loss_mask=mask,
        rollout_logprobs=[0.0] * len(mask), policy_versions=[0] * len(mask), reward=reward, **options,
    )  # fmt: skip


# O29
def test_part_means_are_over_the_trajectories_that_have_the_part() -> None:
    scored = [
        trajectory(1.0, reward_parts={"acc": 1.0}),
        trajectory(0.5),
        trajectory(0.0, reward_parts={"fmt": 1.0}),
        trajectory(1.0, reward_parts={"acc": 0.0}),
    ]

    metrics = rollout_metrics(scored, seconds=1.0)

    assert metrics["critic/score/mean"] == 0.625
    assert metrics["reward/acc/mean"] == 0.5
    assert metrics["reward/fmt/mean"] == 1.0
    # A second batch in another order, with other keys first, changes nothing.
    random.Random(1).shuffle(scored)
    assert part_means("reward", scored) == {"reward/acc/mean": 0.5, "reward/fmt/mean": 1.0}


def test_lengths_turns_and_throughput_are_hand_worked() -> None:
    metrics = rollout_metrics(
        [
            trajectory(0.25, tokens=2, tools=3, prompt=4, num_turns=4, metrics={"generate_s": 1.5}),
            trajectory(1.0, tokens=7, prompt=2, stop_reason="length", metrics={"generate_s": 0.5}),
            trajectory(0.25, tokens=0, prompt=2),
            trajectory(0.5, tokens=3, prompt=8),
        ],
        seconds=4.0,
    )

    spread = {name: [metrics[f"{name}/{kind}"] for kind in ("mean", "max", "min")] for name in (
        "critic/score", "response_length", "prompt_length", "num_turns", "agent_loop/generate_s",
    )}  # fmt: skip
    assert spread == {
        "critic/score": [0.5, 1.0, 0.25],
        "response_length": [15 / 4, 7, 0],  # 5, 7, 0 and 3: tool tokens count
        "prompt_length": [4, 8, 2],
        "num_turns": [2.5, 4, 2],
        "agent_loop/generate_s": [1.0, 1.5, 0.5],  # of the two that know it
    }
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["response/empty_share"] == 0.25
    assert metrics["perf/generated_tokens_per_s"] == 3.0  # 2 + 7 + 0 + 3 sampled tokens in 4 s
    assert metrics["perf/total_num_tokens"] == 31
    assert (metrics["timing_s/gen"], metrics["rollout/num_trajectories"]) == (4.0, 4.0)


# O28
def test_failed_trajectories_count_as_failures_and_nowhere_else() -> None:
    scored = [trajectory(1.0) for _ in range(7)]
    failed = trajectory(0.0, tokens=900, error="ZeroDivisionError", reward_parts={"acc": 0.0})

    metrics = rollout_metrics([*scored, failed], seconds=1.0)

    assert metrics["rollout/failed_share"] == 0.125
    assert metrics["rollout/num_trajectories"] == 8
    without = rollout_metrics(scored, seconds=1.0)
    changed = {"rollout/failed_share", "rollout/num_trajectories"}
    assert {k: v for k, v in metrics.items() if k not in changed} == {
        k: v for k, v in without.items() if k not in changed
    }


def test_an_unscored_trajectory_has_failed() -> None:
    assert rollout_metrics([trajectory(None), trajectory(1.0)], seconds=1.0)["rollout/failed_share"] == 0.5


@pytest.mark.parametrize("trajectories", [[], [trajectory(None)]])
def test_an_iteration_without_a_usable_trajectory_has_finite_numbers(trajectories: list[Trajectory]) -> None:
    metrics = rollout_metrics(trajectories, seconds=0.0)

    assert metrics["rollout/failed_share"] == len(trajectories)
    assert "critic/score/mean" not in metrics


# O16
def test_only_empty_responses_give_finite_numbers() -> None:
    metrics = rollout_metrics([trajectory(0.0, tokens=0)] * 2, seconds=0.0)

    assert all(math.isfinite(value) for value in metrics.values())
    assert (metrics["response/empty_share"], metrics["response_length/max"]) == (1.0, 0.0)
