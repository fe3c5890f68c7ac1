"""GMPO: the geometric mean of a sequence's clipped token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.checks import check_advantages, check_in_range, check_mask, check_same_shape
from lit_rl.algorithms.policy_losses.ratio import log_ratio


def gmpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
) -> Tensor:
    """Return ``-A exp(mean of the clipped log-ratios)``, the same number at every token of a sequence.

    Log-ratios are clipped at ``clip_ratio_high`` where A > 0 and at ``-clip_ratio_low`` where A < 0.
    ``seq-mean-token-mean`` gives the paper's mean over sequences, exact over micro-batches and ranks; other modes
    weigh sequences by length.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float; averaged over the sequence's tokens.
        mask: ``[B, T]`` bool, True where the token counts.
        clip_ratio_low: Lower bound in nats, >= 0.
        clip_ratio_high: Upper bound in nats, >= 0.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2507.20673.
    """
    check_mask(mask)
    check_same_shape(logprobs=logprobs, mask=mask)
    check_advantages(advantages, logprobs)
    check_in_range("clip_ratio_low", clip_ratio_low, 0.0, float("inf"))
    check_in_range("clip_ratio_high", clip_ratio_high, 0.0, float("inf"))
    per_token = advantages.detach().expand_as(logprobs)
    is_negative = per_token < 0
    low = torch.full_like(per_token, -torch.inf).masked_fill(is_negative, -clip_ratio_low)
    high = torch.full_like(per_token, clip_ratio_high).masked_fill(is_negative, torch.inf)
    clipped = torch.clamp(log_ratio(logprobs, old_logprobs), low, high)
    sequence_ratio = masked_mean(clipped, mask, dim=1).exp()  # [B]
    sequence_loss = -masked_mean(per_token, mask, dim=1) * sequence_ratio
    return sequence_loss.unsqueeze(1).expand_as(logprobs)
