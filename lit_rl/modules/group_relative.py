"""Group-relative advantages as a base: what loss they go into differs from algorithm to algorithm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.advantages import group_relative
from lit_rl.experience.batch import Experience
from lit_rl.modules.policy_gradient import PolicyGradientModule


class GroupRelativeModule(PolicyGradientModule):
    """A trajectory's advantage is its reward minus its group's mean, over the group's standard deviation.

    Failed trajectories are in no group; a group of one, or of equal rewards, has advantage 0.

    Source: arXiv:2402.03300, section 4.1.2.
    """

    min_group_size = 2

    def __init__(self, model_name: str, normalize_std: bool = True, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            normalize_std: Divide by the group's standard deviation (sample form); off is Dr. GRPO's advantage.
            kwargs: Options of `PolicyGradientModule`.
        """
        super().__init__(model_name, **kwargs)
        self.normalize_std = normalize_std

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` group-relative advantages of all ranks' trajectories."""
        return group_relative(experience.rewards, experience.group_ids, normalize_std=self.normalize_std)
