"""Times and mishaps of conversations, worked out by hand."""

from __future__ import annotations

import pytest

from lit_rl.metrics.agent_loop import agent_loop_metrics
from lit_rl.types import Trajectory


def conversation(reward: float | None = 1.0, *, tokens: int = 2, **metrics: float) -> Trajectory:
    return Trajectory(
        row_id="r", group_id="g", prompt_ids=[1, 1, 1], response_ids=[2] * tokens, loss_mask=[1] * tokens,
        rollout_logprobs=[0.0] * tokens, policy_versions=[0] * tokens, reward=reward, metrics=metrics,
    )  # fmt: skip


def test_times_and_the_slowest_conversation() -> None:
    metrics = agent_loop_metrics(
        [
            conversation(generate_s=1.0, tool_calls_s=3.0, num_tool_calls=2, score_s=0.5, num_preempted=0, tokens=9),
            conversation(generate_s=3.0, score_s=0.5, num_preempted=1),
        ]
    )
    spreads = {
        name: [metrics[f"agent_loop/{name}/{kind}"] for kind in ("mean", "max", "min")]
        for name in ("generate_s", "tool_s", "score_s", "num_preempted", "num_tool_calls")
    }
    assert spreads == {
        "generate_s": [2.0, 3.0, 1.0],
        "tool_s": [1.5, 3.0, 0.0],  # one called no tool
        "score_s": [0.5, 0.5, 0.5],
        "num_preempted": [0.5, 1, 0],
        "num_tool_calls": [1, 2, 0],
    }
    slowest = {name.rpartition("/")[2]: value for name, value in metrics.items() if "/slowest/" in name}
    assert slowest == {
        "generate_s": 1.0, "tool_s": 3.0, "score_s": 0.5, "num_preempted": 0, "num_tool_calls": 2,
        "prompt_length": 3, "response_length": 9,
    }  # fmt: skip


def test_mishaps_are_totals_and_those_of_failed_conversations_count() -> None:
    metrics = agent_loop_metrics(
        [
            conversation(num_tool_calls=4, num_tool_errors=1, num_invalid_calls=2, ended_by_max_turns=1),
            conversation(num_tool_calls=2, num_tool_errors=1, num_tool_timeouts=1),
            conversation(None, reward_timeout=1, num_resubmitted=2),
            conversation(),
        ]
    )
    assert metrics["agent_loop/num_tool_errors"] == 2
    assert metrics["agent_loop/num_tool_timeouts"] == 1
    assert metrics["agent_loop/num_invalid_calls"] == 2
    assert metrics["agent_loop/num_resubmitted"] == 2
    assert metrics["reward/num_timeouts"] == 1
    assert "reward/num_errors" not in metrics
    assert metrics["agent_loop/ended_by_max_turns_share"] == pytest.approx(1 / 3)  # the last one measured nothing
    assert metrics["agent_loop/num_tool_calls/mean"] == 3.0


def test_what_tools_report_is_averaged_over_those_that_used_them() -> None:
    metrics = agent_loop_metrics([conversation(**{"tool/search/total_results": 3.0}), conversation(generate_s=1.0)])
    assert metrics["tool/search/total_results/mean"] == 3.0


def test_conversations_without_measurements_give_no_metrics() -> None:
    assert agent_loop_metrics([]) == {}
    assert agent_loop_metrics([conversation(), conversation()]) == {}


def test_a_tool_that_counts_its_calls_has_rates_over_them() -> None:
    metrics = agent_loop_metrics(
        [
            conversation(**{"tool/search/num_calls": 3, "tool/search/is_error": 1, "tool/other/seconds": 5}),
            conversation(**{"tool/search/num_calls": 1, "tool/search/is_error": 0}),
            conversation(generate_s=1.0),
        ]
    )
    assert metrics["tool/search/num_calls/mean"] == 2
    assert metrics["tool/search/is_error/mean"] == 0.5
    assert metrics["tool/search/is_error/per_call"] == 0.25
    assert "tool/search/num_calls/per_call" not in metrics
    assert "tool/other/seconds/per_call" not in metrics
