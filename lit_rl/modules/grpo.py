"""GRPO: group-relative advantages and the clipped loss. Dr. GRPO and DAPO are GRPO with other settings."""

from __future__ import annotations

from lit_rl.modules.clipped_policy import ClippedPolicyModule
from lit_rl.modules.group_relative import GroupRelativeModule


class GRPO(ClippedPolicyModule, GroupRelativeModule):
    """Group Relative Policy Optimization.

    A trajectory's advantage is its reward minus its group's mean, over the group's standard deviation
    (`GroupRelativeModule`); the loss is PPO's clipped surrogate (`ClippedPolicyModule`).

    The paper averages over each sequence's tokens first (``loss_agg_mode=seq-mean-token-mean``) and has a KL term
    (``kl_loss_coef=0.04``); the defaults, as is usual today, weigh all tokens alike and have none.

    Source: arXiv:2402.03300, eq. 3.
    """
