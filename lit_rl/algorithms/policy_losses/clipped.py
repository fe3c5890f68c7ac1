"""The clipped surrogate of PPO, with separate lower and upper clip and dual clip; GRPO, Dr.GRPO and DAPO use it too.

Per-token loss only: `lit_rl.algorithms.aggregate` reduces it. Which of the algorithms above it is depends on the
advantages, on the two clip ratios and on the aggregation mode, not on this file.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.checks import check_advantages, check_in_range, check_same_shape
from lit_rl.algorithms.policy_losses.ratio import probability_ratio


def clipped_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> Tensor:
    """Return the clipped policy-gradient loss of every token.

    With r the probability ratio: ``-A min(r, 1 + clip_ratio_high)`` for A >= 0 and ``-A min(max(r, 1 -
    clip_ratio_low), c)`` for A < 0, which is the usual maximum of the plain and the clipped surrogate in one clamp.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained. Finite at masked positions too.
        old_logprobs: ``[B, T]`` float, nats, of the policy at the start of the iteration; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float; not differentiated.
        clip_ratio_low: Lower half-width, in [0, 1].
        clip_ratio_high: Upper half-width, >= 0; DAPO's clip-higher sets it above the lower one.
        clip_ratio_c: Bound on the ratio where the advantage is negative (dual clip), > 1; ``None`` is off.

    Returns:
        ``[B, T]`` loss of the dtype of ``logprobs``.

    Raises:
        ValueError: If shapes differ or a clip ratio is out of range.

    Source: arXiv:1707.06347, eq. 7; dual clip arXiv:1912.09729; clip-higher arXiv:2503.14476, eq. 10.
    """
    check_advantages(advantages, logprobs)
    low, high = _ratio_bounds(advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    ratio = probability_ratio(logprobs, old_logprobs)
    return -advantages.detach() * torch.clamp(ratio, low, high)


@torch.no_grad()
def clip_fractions(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
) -> tuple[Tensor, Tensor]:
    """Return the shares of tokens whose gradient the clip and the dual clip remove.

    The metrics ``actor/pg_clipfrac`` and ``actor/pg_clipfrac_lower``.

    Args:
        logprobs: ``[B, T]`` float, nats.
        old_logprobs: ``[B, T]`` float, nats.
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool, True where the token counts.
        clip_ratio_low: As in `clipped_policy_loss`.
        clip_ratio_high: As in `clipped_policy_loss`.
        clip_ratio_c: As in `clipped_policy_loss`.

    Returns:
        ``clipped``: share of masked tokens with r > 1 + high and A > 0, or r < 1 - low and A < 0.
        ``dual_clipped``: share with r > c and A < 0. Both scalars in [0, 1], 0 for an empty mask.
    """
    check_advantages(advantages, logprobs)
    check_same_shape(logprobs=logprobs, mask=mask)
    low, high = _ratio_bounds(advantages, clip_ratio_low, clip_ratio_high, clip_ratio_c)
    ratio = probability_ratio(logprobs, old_logprobs)
    above = ratio > high
    clipped = ((advantages > 0) & above) | ((advantages < 0) & (ratio < low))
    dual_clipped = (advantages < 0) & above
    return masked_mean(clipped.to(logprobs.dtype), mask), masked_mean(dual_clipped.to(logprobs.dtype), mask)


def _ratio_bounds(
    advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float | None
) -> tuple[Tensor, Tensor]:
    """Return the lowest and the highest ratio that still has a gradient, in the shape of the advantages."""
    check_in_range("clip_ratio_low", clip_ratio_low, 0.0, 1.0)
    check_in_range("clip_ratio_high", clip_ratio_high, 0.0, float("inf"))
    if clip_ratio_c is not None and clip_ratio_c <= 1.0:
        raise ValueError(
            f"clip_ratio_c={clip_ratio_c} must be above 1 (3.0 is usual); None switches the dual clip off."
        )
    bound = float("inf") if clip_ratio_c is None else clip_ratio_c
    is_negative = advantages.detach() < 0
    low = torch.zeros_like(advantages).masked_fill(is_negative, 1.0 - clip_ratio_low)
    high = torch.full_like(advantages, 1.0 + clip_ratio_high).masked_fill(is_negative, bound)
    return low, high
