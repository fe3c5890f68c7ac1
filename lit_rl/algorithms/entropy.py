"""Entropy of the policy's next-token distribution, and the bonus for keeping it up."""

from __future__ import annotations

import torch
from torch import Tensor


def entropy_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the entropy of the softmax, in nats, computed in float32 or higher.

    Args:
        logits: ``[..., V]`` float; a logit of -inf is a token of probability 0.
        temperature: The sampling temperature, > 0: the entropy is that of the distribution that was sampled from.

    Returns:
        ``[...]`` between 0 and ln V.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be above 0; for greedy sampling pass 1.0.")
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    probabilities = torch.softmax(scaled, dim=-1)
    # Probability 0 times logit -inf would be NaN, in the value and in the gradient.
    expected_logit = (probabilities * scaled.masked_fill(scaled == -torch.inf, 0.0)).sum(-1)
    return torch.logsumexp(scaled, dim=-1) - expected_logit


def entropy_loss(entropies: Tensor, coefficient: float) -> Tensor:
    """Return ``-coefficient * entropies``, ``[B, T]``: added to the policy loss before aggregation, it rewards entropy.

    Args:
        entropies: ``[B, T]`` float, nats, differentiable.
        coefficient: Loss units per nat; 0 is off, a negative one lowers the entropy.
    """
    return -coefficient * entropies
