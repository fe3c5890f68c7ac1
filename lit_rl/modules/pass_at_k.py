"""Pass@k training: reward what the best of k answers is worth, not the average one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.advantages import pass_at_k
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule


class PassAtK(ClippedPolicyModule):
    """Policy optimization of pass@k, k being the group size.

    The best trajectory of a group gets its lead over the second best, all others 0: what the group's maximum loses
    without a trajectory is its advantage. A tie for the best gives 0 to all.

    Source: arXiv:2503.19595.
    """

    min_group_size = 2

    def __init__(self, model_name: str, normalize_std: bool = True, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            normalize_std: Divide the lead by the group's standard deviation (sample form).
            kwargs: Options of `ClippedPolicyModule`.
        """
        super().__init__(model_name, **kwargs)
        self.normalize_std = normalize_std

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]``: the lead of each group's best, 0 for the others."""
        return pass_at_k(experience.rewards, experience.group_ids, normalize_std=self.normalize_std)
