"""Lite PPO: the group's mean, the batch's spread, and a mean over tokens."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.advantages import batch_scaled_relative
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule


class LitePPO(ClippedPolicyModule):
    """PPO without a critic in two choices: how advantages are scaled, and the mean over tokens.

    A = (R - mean of the group) / standard deviation of all rewards of the iteration. Prompts whose group differs by one
    answer only are not blown up, as they are by the group's own spread. ``loss_agg_mode`` is ``token-mean``, the
    default.

    Source: arXiv:2508.08221.
    """

    min_group_size = 2

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` group-centred rewards over the spread of all rewards."""
        return batch_scaled_relative(experience.rewards, experience.group_ids)
