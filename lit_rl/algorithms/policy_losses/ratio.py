"""The probability ratio between two policies, kept finite."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_same_shape

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 nats; e^20 is 4.9e8, beyond any clip ratio and finite in float32."""


def log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``logprobs - old_logprobs``, ``[B, T]`` nats, clamped to +-20; the old ones are not differentiated."""
    check_same_shape(logprobs=logprobs, old_logprobs=old_logprobs)
    return (logprobs - old_logprobs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def probability_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return ``exp`` of `log_ratio`, ``[B, T]``."""
    return torch.exp(log_ratio(logprobs, old_logprobs))
