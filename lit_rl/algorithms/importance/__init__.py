"""Rollout correction: importance weights, rejection, presets and mismatch metrics."""

from lit_rl.algorithms.importance.metrics import effective_sample_share, mismatch_metrics
from lit_rl.algorithms.importance.presets import (
    PRESETS,
    Rejection,
    RolloutCorrection,
    correct_rollout,
    rollout_correction,
)
from lit_rl.algorithms.importance.rejection import REJECTION_KINDS, rejection_mask
from lit_rl.algorithms.importance.weights import (
    importance_log_weights,
    masked_importance_weights,
    normalize_weights,
    truncated_importance_weights,
)

__all__ = [
    "PRESETS",
    "REJECTION_KINDS",
    "Rejection",
    "RolloutCorrection",
    "correct_rollout",
    "effective_sample_share",
    "importance_log_weights",
    "masked_importance_weights",
    "mismatch_metrics",
    "normalize_weights",
    "rejection_mask",
    "rollout_correction",
    "truncated_importance_weights",
]
