"""Clip-Cov and KL-Cov: keep the entropy up by restraining the few tokens whose log-prob and advantage covary most.

Tokens are chosen among those given, so the choice is made per micro-batch; its size follows the micro-batch's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.checks import check_advantages, check_in_range, check_mask, check_same_shape
from lit_rl.algorithms.policy_losses.clipped import clipped_policy_loss
from lit_rl.algorithms.policy_losses.ratio import log_ratio


def clip_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    generator: torch.Generator,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_cov_share: float = 0.0002,
    clip_cov_low: float = 1.0,
    clip_cov_high: float = 5.0,
) -> Tensor:
    """Return the clipped loss with 0 at a few random tokens of high covariance.

    Drawn, without replacement, are ``max(1, floor(share * tokens))`` of the tokens that have a covariance between the
    bounds and are not clipped already.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool, True where the token counts.
        generator: Seeded CPU generator; the same seed draws the same tokens on every device.
        clip_ratio_low: As in `clipped_policy_loss`.
        clip_ratio_high: As in `clipped_policy_loss`.
        clip_cov_share: Share of tokens drawn, in [0, 1].
        clip_cov_low: Covariance above which a token may be drawn, nats times advantage units.
        clip_cov_high: Covariance below which it may be drawn.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2505.22617.
    """
    check_in_range("clip_cov_share", clip_cov_share, 0.0, 1.0)
    covariance = token_covariance(logprobs, advantages, mask)
    loss = clipped_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=None,
    )
    ratio = log_ratio(logprobs.detach(), old_logprobs).exp()
    is_clipped = torch.where(advantages > 0, ratio > 1.0 + clip_ratio_high, ratio < 1.0 - clip_ratio_low)
    is_candidate = mask & ~is_clipped & (covariance > clip_cov_low) & (covariance < clip_cov_high)
    candidates = is_candidate.flatten().nonzero().flatten()
    order = torch.randperm(candidates.shape[0], generator=generator)[: _num_chosen(mask, clip_cov_share)]
    chosen = torch.zeros_like(mask).flatten()
    chosen[candidates[order.to(candidates.device)]] = True
    return torch.where(chosen.view_as(mask), 0.0, loss)


def kl_cov_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    kl_coef: float = 0.1,
    kl_cov_share: float = 0.0002,
) -> Tensor:
    """Return ``-A r``, plus ``kl_coef |log r|`` at the tokens of highest covariance.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool, True where the token counts.
        kl_coef: Weight of the penalty, >= 0.
        kl_cov_share: Share of tokens penalised, in [0, 1]; at least one token.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2505.22617.
    """
    check_in_range("kl_cov_share", kl_cov_share, 0.0, 1.0)
    covariance = token_covariance(logprobs, advantages, mask)
    differences = log_ratio(logprobs, old_logprobs)
    num_chosen = min(_num_chosen(mask, kl_cov_share), int(mask.sum()))
    chosen = torch.zeros_like(mask).flatten()
    chosen[covariance.masked_fill(~mask, -torch.inf).flatten().topk(num_chosen).indices] = True
    penalty = torch.where(chosen.view_as(mask), differences.abs(), 0.0)
    return -advantages.detach() * differences.exp() + kl_coef * penalty


@torch.no_grad()
def token_covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return ``(logprob - mean logprob) (A - mean A)`` of every token, ``[B, T]``; means over the mask."""
    check_mask(mask)
    check_same_shape(logprobs=logprobs, mask=mask)
    check_advantages(advantages, logprobs)
    per_token = advantages.expand_as(logprobs)
    return (logprobs - masked_mean(logprobs, mask)) * (per_token - masked_mean(per_token, mask))


def _num_chosen(mask: Tensor, share: float) -> int:
    return max(1, int(share * float(mask.sum())))
