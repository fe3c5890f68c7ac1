"""Pass@k group advantages: only the best trajectory of a group is reinforced, by its lead over the second best."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_grouped
from lit_rl.algorithms.groups import Groups


def pass_at_k(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Return ``(best - second best) / (std + eps)`` for the best of each group and 0 for all others.

    A tie for the best gives 0 to all. A group of one has no second best and gets 0.

    Args:
        rewards: ``[N]`` float, finite, reward units; one per sequence, over all ranks.
        group_ids: ``[N]`` int64.
        normalize_std: False leaves the division by the sample standard deviation out.
        eps: Added to the standard deviation, reward units.

    Returns:
        ``[N]`` advantages of the rewards' dtype.

    Source: arXiv:2503.19595.
    """
    check_grouped(rewards, group_ids)
    groups = Groups.from_ids(group_ids)
    exact = rewards.double()
    is_best = exact == groups.max(exact)[groups.index]
    has_tie = groups.sum(is_best) > 1  # [num_groups]
    second = groups.max(exact.masked_fill(is_best, -torch.inf))  # -inf in a group of one
    lead = exact - second[groups.index]
    if normalize_std:
        lead = lead / (groups.spread(exact)[groups.index] + eps)
    is_rewarded = is_best & ~has_tie[groups.index] & (groups.row_sizes > 1)
    return torch.where(is_rewarded, lead, 0.0).to(rewards.dtype)
