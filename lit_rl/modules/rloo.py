"""RLOO: the baseline of a trajectory is the mean reward of the others of its group."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.advantages import leave_one_out
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule


class RLOO(ClippedPolicyModule):
    """REINFORCE leave-one-out.

    A = R - mean reward of the *other* trajectories of the group: an unbiased baseline. A group of one has A = 0. On
    policy the clipped loss has the gradient of REINFORCE; the clip bounds further updates on the same trajectories.

    Source: arXiv:2402.14740.
    """

    min_group_size = 2

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` rewards minus the mean of the group's others."""
        return leave_one_out(experience.rewards, experience.group_ids)
