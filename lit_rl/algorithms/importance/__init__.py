"""Rollout correction: importance weights, rejection and mismatch metrics between trainer and rollout engine."""

from lit_rl.algorithms.importance.metrics import effective_sample_share, mismatch_metrics
from lit_rl.algorithms.importance.weights import (
    importance_log_weights,
    masked_importance_weights,
    normalize_weights,
    truncated_importance_weights,
)

__all__ = [
    "effective_sample_share",
    "importance_log_weights",
    "masked_importance_weights",
    "mismatch_metrics",
    "normalize_weights",
    "truncated_importance_weights",
]
