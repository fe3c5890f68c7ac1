"""Optimal token baseline: per time step, the group's returns averaged by how much gradient each trajectory carries."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lit_rl.algorithms.advantages.returns import discounted_returns
from lit_rl.algorithms.checks import check_mask, check_same_shape


@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    group_index: Tensor,
    logprobs: Tensor,
    sum_pi_squared: Tensor,
    *,
    importance_weights: Tensor | None = None,
    gamma: float = 1.0,
    num_groups: int | None = None,
    num_steps: int | None = None,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return returns minus a variance-minimising baseline per time step, and the returns.

    With ``w = 1 - 2 pi + sum(pi^2)`` (times the squared importance weight) and W its running sum along the sequence,
    the baseline of a group at step t is ``sum_i(W_it G_it) / (sum_i(W_it) + 1e-8)`` over the trajectories that reach
    step t. Steps count sampled tokens only, so tool answers of different lengths do not shift trajectories against
    each other.

    Rules: where no other trajectory of the group has a token, the advantage is 0. Where a single trajectory is left
    (beyond the second longest), the baseline is 0.

    Trajectories of a group may lie on several ranks: the sums of each group and step are then added up over ranks,
    and the last three arguments, the same on every rank, say how many there are.

    Args:
        rewards: ``[B, T]`` float token rewards, reward units.
        mask: ``[B, T]`` bool, True where the policy sampled the token.
        group_index: ``[B]`` int64, number of the row's group, from 0 (`lit_rl.algorithms.groups.Groups`).
        logprobs: ``[B, T]`` float, nats, of the policy that sampled.
        sum_pi_squared: ``[B, T]`` float in (0, 1]: sum over the vocabulary of the squared probabilities.
        importance_weights: ``[B, T]`` float from `lit_rl.algorithms.importance`; ``None`` is 1.
        gamma: Discount per sampled token, in [0, 1].
        num_groups: Groups over all ranks; ``None`` counts those given.
        num_steps: Sampled tokens of the longest trajectory over all ranks; ``None`` takes ``T``.
        sum_over_ranks: Adds a tensor up over all ranks; ``None``: these are all rows.

    Returns:
        ``advantages`` and ``returns``, each ``[B, T]`` of the rewards' dtype, 0 where masked.

    Source: arXiv:2602.07078 (optimal token baseline).
    """
    check_mask(mask)
    check_same_shape(rewards=rewards, mask=mask, logprobs=logprobs, sum_pi_squared=sum_pi_squared)
    if tuple(group_index.shape) != (mask.shape[0],):
        raise ValueError(
            f"group_index has shape {tuple(group_index.shape)}; it must be [{mask.shape[0]}], one per row."
        )
    returns = discounted_returns(rewards, mask, gamma=gamma)
    energy = 1.0 - 2.0 * logprobs.double().exp() + sum_pi_squared.double()
    if importance_weights is not None:
        check_same_shape(mask=mask, importance_weights=importance_weights)
        energy = energy * importance_weights.double().square()
    running = torch.where(mask, energy, 0.0).cumsum(1)  # [B, T], W

    # Cell (group, step) of every sampled token; the sums over cells run as one index_add each.
    num_steps = mask.shape[1] if num_steps is None else num_steps
    if num_groups is None:
        num_groups = int(group_index.max()) + 1 if group_index.numel() else 0
    first_cells = group_index.unsqueeze(1) * num_steps
    cells = (first_cells + mask.cumsum(1) - 1)[mask]  # [num sampled tokens]
    weight, own_returns = running[mask], returns[mask].double()
    summands = torch.stack([weight * own_returns, weight, torch.ones_like(weight)])
    sums = torch.zeros(3, num_groups * num_steps, dtype=torch.float64, device=mask.device).index_add_(
        1, cells, summands
    )
    weighted, total, reaching = sums if sum_over_ranks is None else sum_over_ranks(sums).to(sums)
    baseline = torch.where(reaching > 1, weighted / (total + 1e-8), 0.0)[cells]
    is_alone = reaching[first_cells.expand_as(mask)[mask]] < 2
    advantages = torch.zeros_like(returns)
    advantages[mask] = torch.where(is_alone, 0.0, own_returns - baseline).to(returns.dtype)
    return advantages, returns
