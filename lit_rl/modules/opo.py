"""OPO: on-policy optimization with the reward baseline of least variance."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.advantages import optimal_reward_baseline
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule


class OPO(ClippedPolicyModule):
    """On-policy RL with an optimal baseline.

    A = R - sum(length R) / sum(length) over the group: longer answers carry more gradient, and so weigh more in the
    baseline. The paper trains strictly on policy: ``data.num_mini_batches=1`` and ``data.ppo_epochs=1``, no KL term.

    Source: arXiv:2505.23585.
    """

    min_group_size = 2

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` rewards minus the group's length-weighted mean."""
        return optimal_reward_baseline(experience.rewards, experience.group_ids, experience.loss_tokens)
