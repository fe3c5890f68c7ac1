"""MaxRL: policy gradient towards maximum likelihood, which weighs hard prompts up."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.advantages import max_likelihood_relative
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule


class MaxRL(ClippedPolicyModule):
    """Maximum-likelihood reinforcement learning.

    A = (R - mean) / mean over the group, 0 where no answer was right. Rewards must not be negative: their mean stands
    for the chance of success.

    Source: arXiv:2602.02710.
    """

    min_group_size = 2

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` rewards relative to the group's success rate."""
        return max_likelihood_relative(experience.rewards, experience.group_ids)
