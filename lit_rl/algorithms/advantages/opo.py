"""OPO: the group baseline is weighted by length, which minimises the variance of the on-policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_grouped, check_same_shape
from lit_rl.algorithms.groups import Groups


def optimal_reward_baseline(rewards: Tensor, group_ids: Tensor, num_tokens: Tensor) -> Tensor:
    """Return each reward minus the length-weighted mean reward of its group.

    ``A_i = R_i - sum_j(len_j R_j) / sum_j(len_j)``. A group of one, a group of equal rewards and a group without
    tokens get 0.

    Args:
        rewards: ``[N]`` float, finite, reward units; one per sequence, over all ranks.
        group_ids: ``[N]`` int64.
        num_tokens: ``[N]`` loss tokens of each sequence.

    Returns:
        ``[N]`` advantages of the rewards' dtype, reward units.

    Source: arXiv:2505.23585.
    """
    check_grouped(rewards, group_ids)
    check_same_shape(rewards=rewards, num_tokens=num_tokens)
    groups = Groups.from_ids(group_ids)
    group_tokens = groups.sum(num_tokens)
    baseline = groups.sum(rewards.double() * num_tokens) / group_tokens.clamp(min=1)
    is_silent = groups.has_no_spread(rewards) | (group_tokens == 0)
    advantages = rewards.double() - baseline[groups.index]
    return torch.where(is_silent[groups.index], 0.0, advantages).to(rewards.dtype)
