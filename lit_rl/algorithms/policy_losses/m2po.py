"""M2PO: a bound on the second moment of the log-ratios instead of one on every ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_advantages, check_mask, check_same_shape
from lit_rl.algorithms.policy_losses.ratio import log_ratio


@torch.no_grad()
def second_moment_mask(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, *, threshold: float = 0.04) -> Tensor:
    """Return ``[B, T]`` bool: the tokens left when those of largest squared log-ratio are dropped, one after the other.

    Dropping ends when the mean of the squared log-ratios that are left is at most the threshold.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats, of the policy that sampled.
        mask: ``[B, T]`` bool, True where the token counts.
        threshold: The paper's tau_M2, nats squared, above 0.

    Source: arXiv:2510.01161.
    """
    check_mask(mask)
    check_same_shape(logprobs=logprobs, mask=mask)
    if threshold <= 0:
        raise ValueError(f"threshold={threshold} must be above 0: no token would be left. The paper uses 0.04.")
    moments = log_ratio(logprobs, old_logprobs)[mask].double().square()  # [num tokens]
    ascending, order = moments.sort()
    counts = torch.arange(1, len(moments) + 1, device=moments.device)
    # Means of the smallest 1, 2, ... moments never fall, so the first so many are kept.
    is_kept = ascending.cumsum(0) / counts <= threshold
    kept = torch.zeros_like(mask)
    kept[mask] = torch.empty_like(is_kept).scatter_(0, order, is_kept)
    return kept


def m2po_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, threshold: float = 0.04
) -> Tensor:
    """Return ``-r A`` at the tokens that `second_moment_mask` keeps, and 0 elsewhere.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool, True where the token counts.
        threshold: As in `second_moment_mask`.

    Returns:
        ``[B, T]`` loss. Dropped tokens still count in what the loss is divided by, as in the paper.

    Source: arXiv:2510.01161.
    """
    check_advantages(advantages, logprobs)
    kept = second_moment_mask(logprobs, old_logprobs, mask, threshold=threshold)
    surrogate = -log_ratio(logprobs, old_logprobs).exp() * advantages.detach()
    return torch.where(kept, surrogate, 0.0)
