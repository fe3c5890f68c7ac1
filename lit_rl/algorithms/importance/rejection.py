"""Leave tokens or whole sequences out whose trainer and engine log-probs disagree too much.

The result narrows the loss mask. Counts that the loss is divided by (``num_tokens``, ``num_sequences``) are taken
*after* rejection: the loss is a mean over what was kept. To keep the original denominator, multiply the loss by the
mask instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.importance.weights import importance_log_weights

REJECTION_KINDS = tuple(
    f"{scope}_{estimator}"
    for scope in ("token", "seq_sum", "seq_mean", "seq_max")
    for estimator in ("k1", "k2", "k3")
    if (scope, estimator) != ("seq_max", "k1")
)


@torch.no_grad()
def rejection_mask(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, *, kind: str, low: float | None = None, high: float
) -> Tensor:
    """Return the mask without the tokens or sequences outside the trusted band.

    With rho the weight (trainer over engine), a kind is a scope and an estimator. Scopes: ``token`` drops tokens;
    ``seq_sum``, ``seq_mean`` and ``seq_max`` drop whole sequences by the sum, mean or maximum over their tokens.
    Estimators: ``k1`` is log rho, kept if ``low <= rho <= high`` (of the product for ``seq_sum``, of the geometric
    mean for ``seq_mean``); ``k2`` is (log rho)^2 / 2 and ``k3`` is rho - 1 - log rho, kept up to ``high``.

    Args:
        logprobs: ``[B, T]`` float, nats, of the trainer.
        rollout_logprobs: ``[B, T]`` float, nats, of the engine.
        mask: ``[B, T]`` bool.
        kind: One of `REJECTION_KINDS`; ``seq_mean_k1`` is rejection by geometric mean.
        low: Lower bound on rho for k1, in (0, high); ``None`` takes 1 / high.
        high: Upper bound, > 0: on rho for k1, in nats for k2 and k3.

    Returns:
        ``[B, T]`` bool, True only where ``mask`` is.
    """
    scope, _, estimator = kind.rpartition("_")
    if kind not in REJECTION_KINDS:
        raise ValueError(f"kind={kind!r} is unknown. Choose one of {', '.join(REJECTION_KINDS)}.")
    gap = importance_log_weights(logprobs, rollout_logprobs, mask)  # [B, T], 0 where masked
    distance = _reduce(_estimate(gap, estimator), mask, scope)
    if estimator != "k1":
        if high <= 0 or low is not None:
            raise ValueError(f"low={low}, high={high}: {kind} takes one upper bound above 0, in nats, and no low.")
        return mask & (distance <= high)
    low = 1.0 / high if low is None and high > 0 else low
    if low is None or not 0 < low < high:
        raise ValueError(
            f"low={low}, high={high}: {kind} bounds the ratio; choose 0 < low < high, such as 0.999 and 1.001."
        )
    # A few rounding errors of slack: a ratio exactly on the bound is kept.
    slack = 4 * torch.finfo(gap.dtype).eps
    return mask & (distance >= math.log(low) - slack) & (distance <= math.log(high) + slack)


def _estimate(gap: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return gap
    return 0.5 * gap.square() if estimator == "k2" else gap.exp() - 1.0 - gap


def _reduce(values: Tensor, mask: Tensor, scope: str) -> Tensor:
    """Return ``[B, T]`` or ``[B, 1]``."""
    if scope == "token":
        return values
    if scope == "seq_sum":
        return values.sum(1, keepdim=True)
    if scope == "seq_mean":
        return masked_mean(values, mask, dim=1).unsqueeze(1)
    return torch.where(mask, values, 0.0).amax(1, keepdim=True)
