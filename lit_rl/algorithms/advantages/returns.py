"""Rewards placed on tokens, and discounted returns that pass over tool and user tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.advantages.scan import backward_scan, time_major
from lit_rl.algorithms.checks import check_in_range, check_mask, check_rewards, check_same_shape


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return the sum of rewards from each sampled token on, discounted once per sampled token.

    Masked positions (tool answers, padding) are passed over without discount, and a reward on one is ignored.

    Args:
        rewards: ``[B, T]`` float, reward units.
        mask: ``[B, T]`` bool, True where the policy sampled the token.
        gamma: Discount per sampled token, in [0, 1].

    Returns:
        ``[B, T]`` of the rewards' dtype, exactly 0 where masked.
    """
    check_mask(mask)
    check_same_shape(rewards=rewards, mask=mask)
    check_in_range("gamma", gamma, 0.0, 1.0)
    is_sampled = time_major(mask)  # [T, B]
    kept = is_sampled.to(rewards.dtype)
    own_rewards = torch.where(is_sampled, time_major(rewards), 0.0)
    returns = backward_scan(own_rewards, (1.0 - kept).add_(kept, alpha=gamma))
    return returns.mul_(kept).t().contiguous()


@torch.no_grad()
def rewards_at_last_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Return token rewards that are 0 except at each row's last sampled token, which carries the row's reward.

    Args:
        rewards: ``[B]`` float, finite, reward units.
        mask: ``[B, T]`` bool. A row without a sampled token loses its reward: it has no token to learn from.

    Returns:
        ``[B, T]`` of the rewards' dtype.
    """
    check_rewards(rewards)
    check_mask(mask)
    if tuple(rewards.shape) != (mask.shape[0],):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; with mask {tuple(mask.shape)} it must be [B].")
    tokens_from_here = (
        mask.flip(1).cumsum(1).flip(1)
    )  # 1 at the last sampled token and at what follows the one before it
    return torch.where(mask & (tokens_from_here == 1), rewards.unsqueeze(1), 0.0)
