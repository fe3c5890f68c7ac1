"""DPPO: a trust region on the change of the token's probability instead of on the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_advantages, check_in_range, check_same_shape
from lit_rl.algorithms.policy_losses.ratio import log_ratio

DIVERGENCES = ("tv", "kl")


def dppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    divergence: str = "tv",
    threshold_low: float = 0.2,
    threshold_high: float = 0.2,
    ratio_cap: float = 20.0,
) -> Tensor:
    """Return ``-A min(r, cap) logprobs`` with the ratio constant, and 0 for tokens outside the trust region.

    A token leaves the region only by moving on in the direction its advantage pushes it: by more than
    ``threshold_high`` upwards where A > 0, by more than ``threshold_low`` downwards elsewhere. The distance is the
    change in probability (``tv``) or the KL divergence of the two-outcome distribution "this token or another"
    (``kl``, nats; 0.05 is usual).

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float; not differentiated.
        divergence: ``tv`` or ``kl``.
        threshold_low: Largest distance downwards, >= 0.
        threshold_high: Largest distance upwards, >= 0.
        ratio_cap: Largest ratio, > 0.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2602.04879.
    """
    check_advantages(advantages, logprobs)
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    check_in_range("threshold_low", threshold_low, 0.0, float("inf"))
    check_in_range("threshold_high", threshold_high, 0.0, float("inf"))
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence={divergence!r} is unknown. Choose one of {', '.join(DIVERGENCES)}.")
    current, old = logprobs.detach(), old_logprobs.detach()
    change = current.exp() - old.exp()
    distance = change.abs() if divergence == "tv" else binary_kl(old, current)
    leaves_upwards = (advantages > 0) & (change > 0) & (distance > threshold_high)
    leaves_downwards = (advantages <= 0) & (change < 0) & (distance > threshold_low)
    ratio = log_ratio(current, old).exp().clamp(max=ratio_cap)
    loss = -advantages.detach() * ratio * logprobs
    return torch.where(leaves_upwards | leaves_downwards, 0.0, loss)


@torch.no_grad()
def binary_kl(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(old || current) between "this token" and "any other", nats, same shape as the inputs."""
    # Probabilities of 1 would give log(0) for "any other".
    old = old_logprobs.exp().clamp(max=1.0 - 1e-6)
    current = logprobs.exp().clamp(max=1.0 - 1e-6)
    return old * (old_logprobs - logprobs) + (1.0 - old) * (torch.log1p(-old) - torch.log1p(-current))
