"""MaxRL: group-centred rewards divided by the group's success rate, which weighs hard prompts up."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_grouped
from lit_rl.algorithms.groups import Groups


def max_likelihood_relative(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Return ``(R - mean) / mean`` within each group; 0 where the mean is 0 or the rewards are all equal.

    Args:
        rewards: ``[N]`` float, finite and >= 0, usually 0 or 1; one per sequence, over all ranks.
        group_ids: ``[N]`` int64.

    Returns:
        ``[N]`` advantages of the rewards' dtype, without unit.

    Raises:
        ValueError: If a reward is negative: the mean is then no success rate.

    Source: arXiv:2602.02710 (MaxRL).
    """
    check_grouped(rewards, group_ids)
    if bool((rewards < 0).any()):
        raise ValueError("rewards holds a negative number; MaxRL divides by the success rate. Use rewards >= 0.")
    groups = Groups.from_ids(group_ids)
    mean = groups.mean(rewards)[groups.index]
    return torch.where(mean > 0, groups.centre(rewards) / mean, 0.0).to(rewards.dtype)
