"""Optimal token baseline: per time step, the group's returns averaged by how much gradient each trajectory carries."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.advantages.returns import discounted_returns
from lit_rl.algorithms.checks import check_mask, check_same_shape
from lit_rl.algorithms.groups import Groups


@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    group_ids: Tensor,
    logprobs: Tensor,
    sum_pi_squared: Tensor,
    *,
    importance_weights: Tensor | None = None,
    gamma: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return returns minus a variance-minimising baseline per time step, and the returns.

    With ``w = 1 - 2 pi + sum(pi^2)`` (times the squared importance weight) and W its running sum along the sequence,
    the baseline of a group at step t is ``sum_i(W_it G_it) / (sum_i(W_it) + 1e-8)`` over the trajectories that reach
    step t. Steps count sampled tokens only, so tool answers of different lengths do not shift trajectories against
    each other.

    Rules: a group of one gets 0. Where a single trajectory is left (beyond the second longest), the baseline is 0. All
    trajectories of a group must be among the rows given.

    Args:
        rewards: ``[B, T]`` float token rewards, reward units.
        mask: ``[B, T]`` bool, True where the policy sampled the token.
        group_ids: ``[B]`` int64.
        logprobs: ``[B, T]`` float, nats, of the policy that sampled.
        sum_pi_squared: ``[B, T]`` float in (0, 1]: sum over the vocabulary of the squared probabilities.
        importance_weights: ``[B, T]`` float from `lit_rl.algorithms.importance`; ``None`` is 1.
        gamma: Discount per sampled token, in [0, 1].

    Returns:
        ``advantages`` and ``returns``, each ``[B, T]`` of the rewards' dtype, 0 where masked.

    Source: arXiv:2602.07078 (optimal token baseline).
    """
    check_mask(mask)
    check_same_shape(rewards=rewards, mask=mask, logprobs=logprobs, sum_pi_squared=sum_pi_squared)
    if tuple(group_ids.shape) != (mask.shape[0],):
        raise ValueError(f"group_ids has shape {tuple(group_ids.shape)}; it must be [{mask.shape[0]}], one per row.")
    returns = discounted_returns(rewards, mask, gamma=gamma)
    energy = 1.0 - 2.0 * logprobs.double().exp() + sum_pi_squared.double()
    if importance_weights is not None:
        check_same_shape(mask=mask, importance_weights=importance_weights)
        energy = energy * importance_weights.double().square()
    running = torch.where(mask, energy, 0.0).cumsum(1)  # [B, T], W

    # Cell (group, step) of every sampled token; the sums over cells run as one index_add each.
    groups = Groups.from_ids(group_ids)
    steps = mask.cumsum(1) - 1  # [B, T], number of the sampled token
    cells = (groups.index.unsqueeze(1) * mask.shape[1] + steps)[mask]  # [num sampled tokens]
    weight, own_returns = running[mask], returns[mask].double()
    num_cells = groups.num_groups * mask.shape[1]
    zeros = torch.zeros(num_cells, dtype=torch.float64, device=mask.device)
    weighted = zeros.clone().index_add_(0, cells, weight * own_returns)
    total = zeros.clone().index_add_(0, cells, weight)
    reaching = zeros.index_add_(0, cells, torch.ones_like(weight))
    baseline = torch.where(reaching > 1, weighted / (total + 1e-8), 0.0)[cells]
    is_alone = groups.row_sizes.unsqueeze(1).expand_as(mask)[mask] < 2
    advantages = torch.zeros_like(returns)
    advantages[mask] = torch.where(is_alone, 0.0, own_returns - baseline).to(returns.dtype)
    return advantages, returns
