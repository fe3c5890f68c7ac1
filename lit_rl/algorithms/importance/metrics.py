"""How far the trainer and the rollout engine disagree: numbers logged always, with or without a correction."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.importance.weights import MAX_LOG_RATIO, importance_log_weights


@torch.no_grad()
def mismatch_metrics(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, cap: float = 2.0
) -> dict[str, Tensor]:
    """Return scalars that compare the trainer's log-probs with the engine's on the sampled tokens.

    With gap = trainer - engine in nats and rho = exp(gap), over the tokens where the mask is True:

    - ``rollout_corr/logprob_gap_mean``, ``rollout_corr/logprob_gap_max``: absolute gap, nats.
    - ``rollout_corr/kl``: mean of -gap, estimates KL(engine || trainer), nats; may be negative.
    - ``rollout_corr/k3_kl``: mean of rho - 1 - gap, the same with less variance, >= 0.
    - ``rollout_corr/chi2_token``: mean of rho^2, minus 1; ``rollout_corr/chi2_seq``: the same with the sequence's
      product.
    - ``rollout_corr/eff_sample_size``: (sum rho)^2 / (n sum rho^2), share in (0, 1]; 1 where all weights are equal.
    - ``rollout_corr/clipped_share``: share of tokens with rho above ``cap``.
    - ``rollout_corr/training_ppl``, ``rollout_corr/rollout_ppl``: perplexity per sequence, averaged over sequences.

    All are finite. Without any token every one is 0, except an effective sample size of 1.

    Args:
        logprobs: ``[B, T]`` float, nats, of the trainer.
        rollout_logprobs: ``[B, T]`` float, nats, of the engine.
        mask: ``[B, T]`` bool.
        cap: Weight from which a token counts as clipped, > 0.
    """
    gap = importance_log_weights(logprobs, rollout_logprobs, mask)  # [B, T]
    ratio = gap.exp()
    has_tokens = mask.any(1)  # [B]
    sequence_gap = gap.sum(1).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # [B]
    metrics = {
        "logprob_gap_mean": masked_mean(gap.abs(), mask),
        "logprob_gap_max": gap.abs().amax() if gap.numel() else gap.sum(),
        "kl": masked_mean(-gap, mask),
        "k3_kl": masked_mean(ratio - 1.0 - gap, mask),
        "chi2_token": masked_mean(ratio.square() - 1.0, mask),
        "chi2_seq": masked_mean((2.0 * sequence_gap).exp() - 1.0, has_tokens),
        "eff_sample_size": effective_sample_share(ratio, mask),
        "clipped_share": masked_mean((ratio > cap).to(gap.dtype), mask),
        "training_ppl": _mean_perplexity(logprobs, mask, has_tokens),
        "rollout_ppl": _mean_perplexity(rollout_logprobs, mask, has_tokens),
    }
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


@torch.no_grad()
def effective_sample_share(weights: Tensor, mask: Tensor) -> Tensor:
    """Return (sum w)^2 / (n sum w^2) over the n unmasked weights, in (0, 1]; 1 if there is none or all are 0."""
    kept = torch.where(mask, weights, 0.0).double()
    squares = mask.sum() * kept.square().sum()
    share = torch.where(squares > 0, kept.sum().square() / squares.clamp(min=1e-300), 1.0)
    return share.to(weights.dtype)


def _mean_perplexity(logprobs: Tensor, mask: Tensor, has_tokens: Tensor) -> Tensor:
    per_sequence = (-masked_mean(logprobs, mask, dim=1)).clamp(max=MAX_LOG_RATIO).exp()  # [B]
    return masked_mean(per_sequence, has_tokens)
