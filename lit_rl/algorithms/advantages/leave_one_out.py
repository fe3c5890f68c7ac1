"""RLOO: the baseline of a trajectory is the mean reward of the others of its group."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.checks import check_grouped
from lit_rl.algorithms.groups import Groups


def leave_one_out(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return each reward minus the mean reward of the *other* trajectories of its group.

    Equal to ``(R - mean) n / (n - 1)``; unbiased, because the baseline does not contain the trajectory itself. A
    group of one has no others and gets 0.

    Args:
        rewards: ``[N]`` float, finite, reward units; one per sequence, over all ranks.
        group_ids: ``[N]`` int64.

    Returns:
        ``[N]`` advantages of the rewards' dtype, reward units.

    Source: arXiv:2402.14740.
    """
    check_grouped(rewards, group_ids)
    groups = Groups.from_ids(group_ids)
    sizes = groups.row_sizes
    return (groups.centre(rewards) * sizes / (sizes - 1).clamp(min=1)).to(rewards.dtype)
