"""VESPO: REINFORCE with a smooth weight of the sequence's ratio that vanishes on both sides of 1."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_mask, check_same_shape
from lit_rl.algorithms.policy_losses.ratio import MAX_LOG_RATIO, log_ratio
from lit_rl.algorithms.policy_losses.reinforce import reinforce_loss

MIN_LOG_RATIO = -18.420681
"""log(1e-8): below it a sequence's ratio counts as this."""


def vespo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """Return ``-phi(W) A logprobs`` with ``phi(W) = exp(lambda (1 - W)) W^k``, constant and 1 at W = 1.

    W is the ratio of the whole sequence, the product of its tokens' ratios. k and lambda depend on the sign of A.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool, True where the token counts.
        k_positive: How fast sequences that have become unlikely fade, for A >= 0, at least 0.
        lambda_positive: How fast sequences that have become likely fade, for A >= 0, above 0.
        k_negative: As ``k_positive``, for A < 0.
        lambda_negative: As ``lambda_positive``, for A < 0.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2602.10693.
    """
    check_mask(mask)
    check_same_shape(logprobs=logprobs, mask=mask)
    differences = torch.where(mask, log_ratio(logprobs.detach(), old_logprobs), 0.0)
    log_w = differences.sum(1, keepdim=True).clamp(MIN_LOG_RATIO, MAX_LOG_RATIO)  # [B, 1]
    is_positive = advantages >= 0
    k = torch.where(is_positive, k_positive, k_negative)
    decay = torch.where(is_positive, lambda_positive, lambda_negative)
    weight = torch.exp(decay + k * log_w - decay * log_w.exp())
    return weight * reinforce_loss(logprobs, advantages)
