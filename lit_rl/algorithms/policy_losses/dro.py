"""DRO: policy gradient with a quadratic pull towards the old policy instead of a clip."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.policy_losses.ratio import log_ratio
from lit_rl.algorithms.policy_losses.reinforce import reinforce_loss


def dro_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    """Return ``-(A logprobs - beta / 2 (log r)^2)``.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float; not differentiated.
        beta: Strength of the pull, > 0; there is no usual value.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2405.19107.
    """
    if beta <= 0:
        raise ValueError(f"beta={beta} must be above 0: without it nothing holds the policy near the old one.")
    return reinforce_loss(logprobs, advantages) + 0.5 * beta * log_ratio(logprobs, old_logprobs).square()
