"""REINFORCE++ and its form with a group baseline: returns normalised over the whole batch instead of a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.advantages.returns import discounted_returns
from lit_rl.algorithms.advantages.whiten import masked_mean_and_std, whiten
from lit_rl.algorithms.checks import check_grouped, check_same_shape
from lit_rl.algorithms.groups import Groups


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, mean: Tensor | None = None, std: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return whitened discounted returns, and the returns themselves.

    Args:
        rewards: ``[B, T]`` float token rewards, usually with the KL penalty taken off
            (`lit_rl.algorithms.kl.kl_in_reward`).
        mask: ``[B, T]`` bool, True where the policy sampled the token.
        gamma: Discount per sampled token, in [0, 1].
        mean: Mean of the returns over the tokens of all ranks; ``None`` takes that of the tokens given.
        std: Sample standard deviation likewise; give both or neither.

    Returns:
        ``advantages`` and ``returns``, each ``[B, T]``, 0 where masked.

    Source: arXiv:2501.03262.
    """
    returns = discounted_returns(rewards, mask, gamma=gamma)
    return whiten(returns, mask, mean=mean, std=std), returns


def reinforce_plus_plus_baseline(
    rewards: Tensor, group_ids: Tensor, num_tokens: Tensor, *, eps: float = 1e-8
) -> Tensor:
    """Return rewards minus their group's mean, whitened over the tokens of the whole batch.

    The group's mean is the baseline; the division is by one spread for all prompts, in which a sequence counts as
    often as it has tokens, because the advantages are spread over tokens. A group of one is 0 before whitening.

    Args:
        rewards: ``[N]`` float, finite, reward units; one per sequence, over all ranks.
        group_ids: ``[N]`` int64.
        num_tokens: ``[N]`` loss tokens of each sequence.
        eps: Added to the variance.

    Returns:
        ``[N]`` advantages of the rewards' dtype. With fewer than two tokens in all they are not divided.

    Source: arXiv:2501.03262.
    """
    check_grouped(rewards, group_ids)
    check_same_shape(rewards=rewards, num_tokens=num_tokens)
    centred = Groups.from_ids(group_ids).centre(rewards)
    mean, std = masked_mean_and_std(centred, num_tokens > 0, num_tokens)
    if float(num_tokens.sum()) < 2:
        return centred.to(rewards.dtype)
    return ((centred - mean) * torch.rsqrt(std.square() + eps)).to(rewards.dtype)
