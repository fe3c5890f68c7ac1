"""Policy losses: log-probs and advantages in, one loss per token out, one family per file."""

from lit_rl.algorithms.policy_losses.clipped import clip_fractions, clipped_policy_loss
from lit_rl.algorithms.policy_losses.ratio import log_ratio, probability_ratio

__all__ = ["clip_fractions", "clipped_policy_loss", "log_ratio", "probability_ratio"]
