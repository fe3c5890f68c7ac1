"""Where the time of an iteration's conversations went, and what went wrong in them.

Each trajectory carries its own times in seconds and its counters; here they become loggable numbers. Nothing is
measured here.
"""

from __future__ import annotations

from collections.abc import Sequence

from lit_rl.types import Trajectory

# Name in the log, and the trajectory's own; the times that make a trajectory slow come first.
_TIMES = {"generate_s": "generate_s", "tool_s": "tool_calls_s", "score_s": "score_s"}
_SPREAD = {**_TIMES, "num_preempted": "num_preempted", "num_tool_calls": "num_tool_calls"}
_TOTALS = (
    "num_tool_errors",
    "num_tool_timeouts",
    "num_invalid_calls",
    "num_refused_calls",
    "num_truncated_tool_responses",
    "num_tool_release_errors",
    "num_resubmitted",
)
_REWARD_TOTALS = {"reward/num_errors": "reward_error", "reward/num_timeouts": "reward_timeout"}


def agent_loop_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Summarise the conversations of an iteration.

    Args:
        trajectories: All of them. Failed ones count in the totals, and in a spread where they know the number.

    Returns:
        ``agent_loop/{generate_s,tool_s,score_s,num_preempted,num_tool_calls}/{mean,max,min}``, zero where a trajectory
        has none; the same numbers and the lengths of the slowest trajectory under ``agent_loop/slowest/``; totals of
        tool errors, time-outs and wrong calls; shares of conversations that a limit ended; means of what each tool
        reported, over the trajectories that used it, and, of a tool that reports ``num_calls``, over its calls
        (``per_call``). What no trajectory knows is left out.
    """
    measured = [trajectory for trajectory in trajectories if trajectory.metrics]
    if not measured:
        return {}
    known = {name for trajectory in measured for name in trajectory.metrics}
    metrics: dict[str, float] = {}
    for name, own in _SPREAD.items():
        if own in known:
            values = [trajectory.metrics.get(own, 0.0) for trajectory in measured if not trajectory.has_failed]
            metrics |= spread(f"agent_loop/{name}", values)
    metrics |= _slowest(measured, known)
    totals = {f"agent_loop/{name}": name for name in _TOTALS} | _REWARD_TOTALS
    for name, own in totals.items():
        if own in known:
            metrics[name] = sum(trajectory.metrics.get(own, 0.0) for trajectory in measured)
    for own in known:
        if own.startswith("ended_by_"):
            ended = sum(trajectory.metrics.get(own, 0.0) for trajectory in measured)
            metrics[f"agent_loop/{own}_share"] = ended / len(measured)
        elif own.startswith("tool/"):
            reported = [trajectory.metrics[own] for trajectory in measured if own in trajectory.metrics]
            metrics[f"{own}/mean"] = sum(reported) / len(reported)
            # A tool that counts its calls has rates: of failures, of cache hits, seconds per call.
            calls = f"{own.rpartition('/')[0]}/num_calls"
            if own != calls and (num_calls := sum(trajectory.metrics.get(calls, 0.0) for trajectory in measured)):
                metrics[f"{own}/per_call"] = sum(reported) / num_calls
    return metrics


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, largest and smallest value; nothing where there are none."""
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def _slowest(trajectories: Sequence[Trajectory], known: set[str]) -> dict[str, float]:
    slowest = max(trajectories, key=lambda trajectory: sum(trajectory.metrics.get(own, 0.0) for own in _TIMES.values()))
    numbers = {name: slowest.metrics.get(own, 0.0) for name, own in _SPREAD.items() if own in known}
    numbers |= {
        "prompt_length": float(len(slowest.prompt_ids)),
        "response_length": float(len(slowest.response_ids)),
    }
    return {f"agent_loop/slowest/{name}": number for name, number in numbers.items()}
