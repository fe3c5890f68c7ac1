"""Losses of the form ``-weight * A * logprob`` with a constant weight: plain REINFORCE (GPG) and CISPO."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.checks import check_advantages, check_in_range
from lit_rl.algorithms.policy_losses.ratio import probability_ratio


def reinforce_loss(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return ``-A logprobs``, the policy gradient without ratio and clip (the loss of GPG).

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        advantages: ``[B, 1]`` or ``[B, T]`` float; not differentiated.

    Returns:
        ``[B, T]`` loss.

    Source: GPG arXiv:2504.02546.
    """
    check_advantages(advantages, logprobs)
    return -advantages.detach() * logprobs


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> Tensor:
    """Return ``-clip(r) A logprobs`` with the clipped ratio held constant: a clipped token keeps a gradient.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats.
        advantages: ``[B, 1]`` or ``[B, T]`` float; not differentiated.
        clip_ratio_low: Lower half-width, in [0, 1]; 1 leaves the ratio unbounded below, as the paper does.
        clip_ratio_high: Upper half-width, >= 0.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2506.13585.
    """
    check_in_range("clip_ratio_low", clip_ratio_low, 0.0, 1.0)
    check_in_range("clip_ratio_high", clip_ratio_high, 0.0, float("inf"))
    weight = probability_ratio(logprobs.detach(), old_logprobs).clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return weight * reinforce_loss(logprobs, advantages)
