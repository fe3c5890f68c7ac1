"""ReMax: the baseline is the reward of one greedy rollout of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.advantages.returns import discounted_returns
from lit_rl.algorithms.checks import check_rewards


def remax(rewards: Tensor, greedy_rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the undiscounted reward-to-go minus the prompt's greedy reward, and the reward-to-go.

    Args:
        rewards: ``[B, T]`` float token rewards of the sampled trajectories, reward units.
        greedy_rewards: ``[B]`` float, finite: the reward of the greedy trajectory (temperature 0) of each row's prompt.
        mask: ``[B, T]`` bool, True where the policy sampled the token.

    Returns:
        ``advantages`` and ``returns``, each ``[B, T]``, 0 where masked.

    Source: arXiv:2310.10505.
    """
    check_rewards(greedy_rewards, "greedy_rewards")
    if tuple(greedy_rewards.shape) != (rewards.shape[0],):
        raise ValueError(
            f"greedy_rewards has shape {tuple(greedy_rewards.shape)}; with rewards {tuple(rewards.shape)} it must be "
            "[B], one greedy reward per row. Repeat a prompt's greedy reward for each of its trajectories."
        )
    returns = discounted_returns(rewards, mask)
    return torch.where(mask, returns - greedy_rewards.unsqueeze(1), 0.0).to(returns.dtype), returns
