"""Losses and diagnostics of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.checks import check_mask, check_same_shape


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """Return half the squared error per token, ``[B, T]``.

    Args:
        values: ``[B, T]`` float, the critic's present output, reward units.
        returns: ``[B, T]`` float, reward units; not differentiated.
    """
    check_same_shape(values=values, returns=returns)
    return 0.5 * (values - returns.detach()).square()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float = 0.5) -> Tensor:
    """Return the larger of half the squared error of the value and of the value clipped to the old one.

    Args:
        values: ``[B, T]`` float, the critic's present output, reward units.
        old_values: ``[B, T]`` float, its output before the update; not differentiated.
        returns: ``[B, T]`` float, reward units; not differentiated.
        clip_range: Furthest a value may move from the old one and still be trained, reward units, > 0.

    Returns:
        ``[B, T]`` loss.

    Source: PPO's reference implementation; arXiv:1707.06347 does not mention it.
    """
    check_same_shape(values=values, old_values=old_values, returns=returns)
    clipped = _clip_to_old(values, old_values, clip_range)
    return torch.max(value_loss(values, returns), value_loss(clipped, returns))


@torch.no_grad()
def value_clip_fraction(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip_range: float = 0.5
) -> Tensor:
    """Return the share of unmasked tokens whose clipped error is the larger one (``critic/vf_clipfrac``)."""
    check_same_shape(values=values, old_values=old_values, returns=returns)
    clipped = _clip_to_old(values, old_values, clip_range)
    is_clipped = value_loss(clipped, returns) > value_loss(values, returns)
    return masked_mean(is_clipped.to(values.dtype), mask)


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return ``1 - var(returns - values) / var(returns)`` over unmasked tokens (``critic/vf_explained_var``).

    1 is a perfect critic, 0 one no better than a constant. 0 where the returns do not vary or there is no token.

    Args:
        values: ``[B, T]`` float.
        returns: ``[B, T]`` float.
        mask: ``[B, T]`` bool.
    """
    check_mask(mask)
    check_same_shape(values=values, returns=returns, mask=mask)
    spread = _masked_variance(returns, mask)
    error = _masked_variance(returns - values, mask)
    return torch.where(spread > 0, 1.0 - error / torch.where(spread > 0, spread, 1.0), 0.0)


def _clip_to_old(values: Tensor, old_values: Tensor, clip_range: float) -> Tensor:
    if clip_range <= 0:
        raise ValueError(f"clip_range={clip_range} must be above 0. Use value_loss for a critic without clipping.")
    anchor = old_values.detach()
    return torch.clamp(values, anchor - clip_range, anchor + clip_range)


def _masked_variance(values: Tensor, mask: Tensor) -> Tensor:
    kept = torch.where(mask, values, 0.0)
    return masked_mean((kept - masked_mean(kept, mask)).square(), mask)
