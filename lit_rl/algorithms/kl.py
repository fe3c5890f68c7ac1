"""Estimators of the KL divergence from the reference policy.

The same estimators serve a KL term in the loss, a KL term in the reward, and reverse-KL distillation (the reference
is then the teacher). They work on the sampled token's log-probs; full-vocabulary KL is not here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_same_shape
from lit_rl.algorithms.kl_controllers import AdaptiveKLController, FixedKLController

__all__ = ["KL_KINDS", "AdaptiveKLController", "FixedKLController", "kl_in_reward", "kl_penalty"]

KL_KINDS = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """Return an estimate of KL(policy || reference) at every sampled token.

    With d = ``logprobs - ref_logprobs``:

    - ``k1`` (``kl``): d; unbiased, may be negative. As a loss its expected gradient is 0: use it in the reward, or as
      ``k1+``.
    - ``abs``: absolute value of d.
    - ``k2`` (``mse``): d^2 / 2; biased, its gradient is an unbiased estimate of the KL's gradient.
    - ``k3`` (``low_var_kl``): exp(-d) - 1 + d; unbiased, never negative. -d is clamped to +-20, the result to 10.
    - any of them with ``+``: the value of that kind with the gradient of ``k2`` (straight-through).

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy.
        ref_logprobs: ``[B, T]`` float, nats, of the reference; not differentiated.
        kind: One of the above.

    Returns:
        ``[B, T]`` nats, not masked.

    Raises:
        ValueError: If shapes differ or the kind is unknown.

    Source: J. Schulman, "Approximating KL divergence", 2020 (k1, k2, k3).
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    base = kind.removesuffix("+")
    if base not in KL_KINDS:
        raise ValueError(
            f"KL kind {kind!r} is unknown. Choose one of {', '.join(KL_KINDS)}, each with or without a final '+'."
        )
    difference = logprobs - ref_logprobs.detach()
    value = _estimate(difference, base)
    if not kind.endswith("+"):
        return value
    surrogate = 0.5 * difference.square()
    return value.detach() + (surrogate - surrogate.detach())


def kl_in_reward(rewards: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return token rewards minus ``kl_coef`` times k1 of the sampling policy, ``[B, T]``, detached.

    Masked tokens keep their reward.

    Args:
        rewards: ``[B, T]`` float, reward units.
        old_logprobs: ``[B, T]`` float, nats, of the policy that sampled.
        ref_logprobs: ``[B, T]`` float, nats.
        mask: ``[B, T]`` bool.
        kl_coef: Reward units per nat, >= 0.
    """
    check_same_shape(rewards=rewards, old_logprobs=old_logprobs, mask=mask)
    penalty = kl_penalty(old_logprobs.detach(), ref_logprobs, "k1")
    return rewards - kl_coef * torch.where(mask, penalty, 0.0)


def _estimate(difference: Tensor, base: str) -> Tensor:
    if base in ("k1", "kl"):
        return difference
    if base == "abs":
        return difference.abs()
    if base in ("k2", "mse"):
        return 0.5 * difference.square()
    # Clamped before exp, so that neither value nor gradient overflows.
    reverse = (-difference).clamp(-20.0, 20.0)
    return (torch.exp(reverse) - reverse - 1.0).clamp(-10.0, 10.0)
