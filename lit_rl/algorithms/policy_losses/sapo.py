"""SAPO: a smooth gate on the ratio instead of a hard clip."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_advantages
from lit_rl.algorithms.policy_losses.ratio import probability_ratio


def sapo_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """Return ``-A sigmoid(tau (r - 1)) 4 / tau``.

    Its gradient equals the unclipped one at r = 1 and fades away from there.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float; not differentiated.
        tau_positive: Temperature where A > 0, > 0; larger fades faster.
        tau_negative: Temperature elsewhere, > 0.

    Returns:
        ``[B, T]`` loss. The paper aggregates with ``seq-mean-token-mean``.

    Source: arXiv:2511.20347.
    """
    check_advantages(advantages, logprobs)
    if tau_positive <= 0 or tau_negative <= 0:
        raise ValueError(f"tau_positive={tau_positive} and tau_negative={tau_negative} must both be above 0.")
    constant = advantages.detach()
    tau = torch.full_like(constant, tau_negative).masked_fill(constant > 0, tau_positive)
    return -constant * torch.sigmoid(tau * (probability_ratio(logprobs, old_logprobs) - 1.0)) * (4.0 / tau)
