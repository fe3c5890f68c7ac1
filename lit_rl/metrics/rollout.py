"""What an iteration's trajectories say, as loggable numbers. Names are verl's where verl has one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lit_rl.metrics.agent_loop import agent_loop_metrics, spread
from lit_rl.types import Trajectory


def rollout_metrics(trajectories: Sequence[Trajectory], seconds: float) -> dict[str, float]:
    """Summarise all trajectories of an iteration; failed ones count only as failures.

    Args:
        trajectories: Of all ranks.
        seconds: Wall-clock time of the rollout.
    """
    usable = [trajectory for trajectory in trajectories if not trajectory.has_failed]
    metrics = {
        "timing_s/gen": seconds,
        "rollout/num_trajectories": float(len(trajectories)),
        "rollout/failed_share": (len(trajectories) - len(usable)) / max(len(trajectories), 1),
    }
    metrics |= agent_loop_metrics(trajectories)
    if not usable:
        return metrics
    rewards = [float(trajectory.reward or 0.0) for trajectory in usable]
    lengths = [float(len(trajectory.response_ids)) for trajectory in usable]
    prompts = [float(len(trajectory.prompt_ids)) for trajectory in usable]
    metrics |= spread("critic/score", rewards)
    metrics |= spread("response_length", lengths)
    metrics |= spread("prompt_length", prompts)
    metrics |= spread("num_turns", [float(trajectory.num_turns) for trajectory in usable])
    metrics["response_length/clip_ratio"] = sum(trajectory.is_truncated for trajectory in usable) / len(usable)
    metrics["response/empty_share"] = sum(not trajectory.response_ids for trajectory in usable) / len(usable)
    metrics["perf/generated_tokens_per_s"] = sum(trajectory.num_loss_tokens for trajectory in usable) / max(
        seconds, 1e-9
    )
    metrics["perf/total_num_tokens"] = float(sum(trajectory.length for trajectory in usable))
    metrics |= part_means("reward", usable)
    return metrics


def part_means(prefix: str, trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Mean of each named reward part over the trajectories that have it (keys may differ between trajectories)."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            values.setdefault(name, []).append(value)
    return {f"{prefix}/{name}/mean": sum(numbers) / len(numbers) for name, numbers in values.items()}
