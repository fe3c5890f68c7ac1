"""Replace groups whose rewards are all equal by groups of fresh prompts: they would teach a group baseline nothing.

Position in the flow: collector -> **dynamic sampling** -> rollouts, once or a few times -> experience. A group counts
as equal if its trajectories that did not fail all have the same reward; a group of one does. Source: arXiv:2503.14476,
section 3.2 (DAPO); the bound is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lit_rl.types import Prompt, Trajectory


@dataclass(kw_only=True)
class SampledGroups:
    """What came of an iteration's rollouts.

    Attributes:
        kept: Trajectories to learn from, whole groups.
        everything: All trajectories that were rolled out.
        metrics: Rounds and groups, ready to log; empty where nothing is replaced.
    """

    kept: list[Trajectory]
    everything: list[Trajectory]
    metrics: dict[str, float]


def sample_until_spread(
    rows: Sequence[Prompt],
    roll_out: Callable[[Sequence[Prompt], int], list[Trajectory]],
    next_rows: Callable[[int], Sequence[Prompt]],
    max_rounds: int,
) -> SampledGroups:
    """Roll out rows until as many groups as rows have rewards that differ, or the rounds are used up.

    Groups that are missing then stay missing: the loss is a mean over fewer tokens, not over tokens without a gradient.
    Where no group at all has spread, the first ones are kept, and the update is skipped as weightless.

    Args:
        rows: Of the first rollout.
        roll_out: Rolls out rows; the number tells how many groups of this iteration came before.
        next_rows: Takes so many fresh rows.
        max_rounds: Further rollouts, at most; 0 keeps every group.
    """
    first = roll_out(rows, 0)
    if max_rounds == 0:
        return SampledGroups(kept=first, everything=first, metrics={})
    everything, kept = list(first), _with_spread(first)
    num_groups, rounds = len(rows), 0
    while (missing := len(rows) - len({trajectory.group_id for trajectory in kept})) > 0 and rounds < max_rounds:
        fresh_rows = next_rows(missing)
        fresh = roll_out(fresh_rows, num_groups)
        num_groups += len(fresh_rows)
        rounds += 1
        everything += fresh
        kept += _with_spread(fresh)
    metrics = {"rounds": float(rounds), "num_groups": float(num_groups), "missing_groups": float(missing)}
    return SampledGroups(
        kept=kept or first,
        everything=everything,
        metrics={f"rollout/dynamic_sampling/{name}": value for name, value in metrics.items()},
    )


def _with_spread(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Trajectories of the groups in which two rewards differ."""
    rewards: dict[str, set[float | None]] = {}
    for trajectory in trajectories:
        if not trajectory.has_failed:
            rewards.setdefault(trajectory.group_id, set()).add(trajectory.reward)
    return [trajectory for trajectory in trajectories if len(rewards.get(trajectory.group_id, ())) > 1]
