"""GPG: group-centred rewards, scaled up for the trajectories of the batch that earned nothing."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.checks import check_grouped
from lit_rl.algorithms.groups import Groups


def group_policy_gradient(rewards: Tensor, group_ids: Tensor, *, norm: float = 1.0) -> Tensor:
    """Return ``alpha (R - mean of the group) / norm`` with alpha = N / max(1, number of rewards that are not 0).

    A group of one gets 0.

    Args:
        rewards: ``[N]`` float, finite, reward units; one per sequence, over all ranks.
        group_ids: ``[N]`` int64.
        norm: Divisor F_norm of the paper, > 0, reward units; 1 is off.

    Returns:
        ``[N]`` advantages of the rewards' dtype.

    Source: arXiv:2504.02546; alpha by rewards as in verl.
    """
    check_grouped(rewards, group_ids)
    if norm <= 0:
        raise ValueError(f"norm={norm} must be above 0; 1.0 switches the division off.")
    num_rewarded = (rewards != 0).sum().clamp(min=1)
    scale = rewards.shape[0] / num_rewarded.double()
    return (scale * Groups.from_ids(group_ids).centre(rewards) / norm).to(rewards.dtype)
