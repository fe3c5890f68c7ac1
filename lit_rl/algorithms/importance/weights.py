"""Importance weights between the trainer's log-probs and those of the engine that sampled.

The engine and the trainer compute slightly different numbers for the same weights, and with stale rollouts clearly
different ones. The weight rho = pi_trainer / pi_engine of a token multiplies its loss; bounding it trades variance
for bias. Which trainer log-probs go in decides the mode: the old ones (decoupled: the weights are computed once) or
the current ones (bypass). Weights are constants: no gradient flows through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.checks import check_mask, check_same_shape

MAX_LOG_RATIO = 20.0
"""Log-weights are clamped to plus or minus this many nats, token and sequence sums alike."""

LEVELS = ("token", "sequence", "geometric")


@torch.no_grad()
def importance_log_weights(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, level: str = "token") -> Tensor:
    """Return the logarithm of the unbounded weights, in nats, clamped to +-20, 0 where masked.

    Args:
        logprobs: ``[B, T]`` float, nats, of the trainer.
        rollout_logprobs: ``[B, T]`` float, nats, of the engine.
        mask: ``[B, T]`` bool, True where the policy sampled the token. Masked positions are never read into a result.
        level: ``token``: the token's own log-ratio. ``sequence``: the sum over the sequence, at each of its tokens;
            unbiased, of high variance. ``geometric``: the mean over the sequence's tokens, at each of them.

    Returns:
        ``[B, T]`` of the dtype of ``logprobs``.
    """
    check_mask(mask)
    check_same_shape(logprobs=logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is unknown. Choose one of {', '.join(LEVELS)}.")
    gap = torch.where(mask, logprobs - rollout_logprobs, 0.0)
    if level == "sequence":
        gap = gap.sum(1, keepdim=True)  # [B, 1]
    elif level == "geometric":
        gap = masked_mean(gap, mask, dim=1).unsqueeze(1)  # [B, 1]
    return torch.where(mask, gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), 0.0)


@torch.no_grad()
def truncated_importance_weights(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, level: str = "token", cap: float = 2.0
) -> Tensor:
    """Return ``min(rho, cap)`` (truncated importance sampling), detached, 0 where masked.

    Args:
        logprobs: ``[B, T]`` float, nats, of the trainer.
        rollout_logprobs: ``[B, T]`` float, nats, of the engine.
        mask: ``[B, T]`` bool.
        level: See `importance_log_weights`.
        cap: Largest weight, > 0; 2 is usual.

    Returns:
        ``[B, T]`` of the dtype of ``logprobs``.

    Source: E. Ionides, "Truncated importance sampling", 2008; for rollouts arXiv:2505.24034.
    """
    if cap <= 0:
        raise ValueError(f"cap={cap} must be above 0; 2.0 is usual.")
    log_weights = importance_log_weights(logprobs, rollout_logprobs, mask, level=level)
    return torch.where(mask, log_weights.exp().clamp(max=cap), 0.0)


@torch.no_grad()
def masked_importance_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """Return rho where ``low <= rho <= high`` and 0 elsewhere (IcePop), detached.

    Outliers lose their gradient instead of keeping a bounded one. They still count in the loss's denominator: their
    loss is 0, they are not left out.

    Args:
        logprobs: ``[B, T]`` float, nats, of the trainer.
        rollout_logprobs: ``[B, T]`` float, nats, of the engine.
        mask: ``[B, T]`` bool.
        level: See `importance_log_weights`.
        low: Smallest weight that is kept, >= 0.
        high: Largest weight that is kept, > low.

    Source: "Small leak can sink a great ship" (IcePop), Ling team, 2025.
    """
    if not 0 <= low < high:
        raise ValueError(f"low={low}, high={high}: the band must have 0 <= low < high, such as 0.5 and 5.0.")
    weights = importance_log_weights(logprobs, rollout_logprobs, mask, level=level).exp()
    return torch.where(mask & (weights >= low) & (weights <= high), weights, 0.0)


@torch.no_grad()
def normalize_weights(weights: Tensor, mask: Tensor, mean: Tensor | None = None) -> Tensor:
    """Return the weights divided by their mean, so that they average 1 over the batch.

    Args:
        weights: ``[B, T]`` float, 0 where masked.
        mask: ``[B, T]`` bool.
        mean: Scalar mean weight over all ranks' tokens; ``None`` takes that of the tokens given. A mean of 0 changes
            nothing.
    """
    mean = masked_mean(weights, mask) if mean is None else mean
    return torch.where(mask, weights / torch.where(mean > 0, mean, 1.0), 0.0)
