"""Advantage estimators: rewards in, advantages out, one family per file.

Sequence-level ones take ``[N]`` rewards of all sequences over all ranks and return ``[N]``; token-level ones work on
``[B, T]``. All share one rule: a trajectory without another one to compare it with gets the advantage 0 from a group
baseline.
"""

from lit_rl.algorithms.advantages.gae import gae, length_adaptive_lambda
from lit_rl.algorithms.advantages.gdpo import decoupled_group_relative
from lit_rl.algorithms.advantages.gpg import group_policy_gradient
from lit_rl.algorithms.advantages.group_relative import (
    batch_scaled_relative,
    check_group_size,
    group_relative,
    zero_spread_share,
)
from lit_rl.algorithms.advantages.leave_one_out import leave_one_out
from lit_rl.algorithms.advantages.max_rl import max_likelihood_relative
from lit_rl.algorithms.advantages.multi_turn import spread_turns, turn_index, turn_mask, turn_relative, turn_returns
from lit_rl.algorithms.advantages.opo import optimal_reward_baseline
from lit_rl.algorithms.advantages.optimal_token_baseline import optimal_token_baseline
from lit_rl.algorithms.advantages.pass_at_k import pass_at_k
from lit_rl.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from lit_rl.algorithms.advantages.remax import remax
from lit_rl.algorithms.advantages.returns import discounted_returns, rewards_at_last_token
from lit_rl.algorithms.advantages.whiten import masked_mean_and_std, whiten

__all__ = [
    "batch_scaled_relative",
    "check_group_size",
    "decoupled_group_relative",
    "discounted_returns",
    "gae",
    "group_policy_gradient",
    "group_relative",
    "leave_one_out",
    "length_adaptive_lambda",
    "masked_mean_and_std",
    "max_likelihood_relative",
    "optimal_reward_baseline",
    "optimal_token_baseline",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rewards_at_last_token",
    "spread_turns",
    "turn_index",
    "turn_mask",
    "turn_relative",
    "turn_returns",
    "whiten",
    "zero_spread_share",
]
