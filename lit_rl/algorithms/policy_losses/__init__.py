"""Policy losses: log-probs and advantages in, one loss per token ``[B, T]`` out, one family per file.

All are reduced by `lit_rl.algorithms.aggregate.aggregate_loss` in whichever mode the user chose. Dr.GRPO is
`clipped_policy_loss` with undivided group advantages and ``seq-mean-token-sum-norm``; DAPO is it with a higher upper
clip and ``token-mean``.
"""

from lit_rl.algorithms.policy_losses.clipped import clip_fractions, clipped_policy_loss
from lit_rl.algorithms.policy_losses.covariance import clip_cov_loss, kl_cov_loss, token_covariance
from lit_rl.algorithms.policy_losses.decoupled import bypass_reinforce_loss, decoupled_policy_loss
from lit_rl.algorithms.policy_losses.dppo import binary_kl, dppo_loss
from lit_rl.algorithms.policy_losses.dro import dro_loss
from lit_rl.algorithms.policy_losses.gmpo import gmpo_loss
from lit_rl.algorithms.policy_losses.gspo import gspo_loss
from lit_rl.algorithms.policy_losses.m2po import m2po_loss, second_moment_mask
from lit_rl.algorithms.policy_losses.ratio import log_ratio, probability_ratio
from lit_rl.algorithms.policy_losses.reinforce import cispo_loss, reinforce_loss
from lit_rl.algorithms.policy_losses.sapo import sapo_loss
from lit_rl.algorithms.policy_losses.vespo import vespo_loss

__all__ = [
    "binary_kl",
    "bypass_reinforce_loss",
    "cispo_loss",
    "clip_cov_loss",
    "clip_fractions",
    "clipped_policy_loss",
    "decoupled_policy_loss",
    "dppo_loss",
    "dro_loss",
    "gmpo_loss",
    "gspo_loss",
    "kl_cov_loss",
    "log_ratio",
    "m2po_loss",
    "probability_ratio",
    "reinforce_loss",
    "sapo_loss",
    "second_moment_mask",
    "token_covariance",
    "vespo_loss",
]
