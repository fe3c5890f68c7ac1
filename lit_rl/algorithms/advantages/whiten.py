"""Bring token advantages to mean 0 and variance 1."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_mask, check_same_shape


@torch.no_grad()
def whiten(
    values: Tensor, mask: Tensor, *, mean: Tensor | None = None, std: Tensor | None = None, eps: float = 1e-8
) -> Tensor:
    """Return ``(values - mean) / sqrt(std^2 + eps)`` where the mask is True, and 0 elsewhere.

    With fewer than two tokens there is no spread: the values come back as they are (masked), rather than an error.

    Args:
        values: ``[B, T]`` float.
        mask: ``[B, T]`` bool.
        mean: Scalar mean over the tokens of all ranks; ``None`` takes that of the tokens given.
        std: Scalar sample standard deviation (divisor n - 1) over all ranks; ``None`` likewise. Give both or neither.
        eps: Added to the variance.

    Returns:
        ``[B, T]`` of the values' dtype.
    """
    check_mask(mask)
    check_same_shape(values=values, mask=mask)
    if (mean is None) != (std is None):
        raise ValueError("whiten got one of mean and std. Pass both (reduced over all ranks), or neither.")
    if mean is None or std is None:
        num_tokens = mask.sum()
        mean, std = masked_mean_and_std(values, mask)
        # In one expression, without asking the device for the count.
        mean = torch.where(num_tokens > 1, mean, 0.0)
        std = torch.where(num_tokens > 1, std, 1.0)
    whitened = (values - mean) * torch.rsqrt(std.square() + eps)
    return torch.where(mask, whitened, 0.0).to(values.dtype)


@torch.no_grad()
def masked_mean_and_std(values: Tensor, mask: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and sample standard deviation (divisor n - 1) of the unmasked values, as float64 scalars.

    Args:
        values: Any shape, float.
        mask: Same shape, bool.
        weights: Same shape; how many times each value counts, such as the tokens of a sequence. ``None`` is once.

    Returns:
        ``mean`` (0 for none) and ``std`` (0 for fewer than two).
    """
    counts = mask.double() if weights is None else torch.where(mask, weights, 0).double()
    kept = torch.where(mask, values, 0.0).double()
    total = counts.sum()
    mean = (kept * counts).sum() / total.clamp(min=1)
    variance = (counts * (kept - mean).square()).sum() / (total - 1).clamp(min=1)
    return mean, variance.sqrt()
