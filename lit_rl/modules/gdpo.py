"""GDPO: several rewards, each compared within its group before they are added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.advantages import decoupled_group_relative
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule
from lit_rl.modules.option_ranges import check_number


class GDPO(ClippedPolicyModule):
    """Group reward-decoupled normalization policy optimization.

    A = sum over rewards k of w_k (R_k - mean_k) / std_k within the group, whitened over all tokens of the iteration. A
    reward of small spread (a format bonus) counts as much as one of large spread; what the trajectory's own ``reward``
    is does not matter.

    Source: arXiv:2601.05242.
    """

    min_group_size = 2

    def __init__(self, model_name: str, reward_weights: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            reward_weights: Weight w_k by name of a reward part, at least one: a key of what the scorer returns, or
                ``reward`` for the trajectory's reward itself. Required.
            kwargs: Options of `ClippedPolicyModule`.
        """
        super().__init__(model_name, **kwargs)
        if not reward_weights:
            raise ValueError(
                f"model.reward_weights={reward_weights}: GDPO needs a weight by name of every reward that counts, such "
                "as {acc: 1.0, well_formed: 0.5}. Name keys of what the scorer returns."
            )
        for name, weight in reward_weights.items():
            check_number(f"reward_weights.{name}", weight)
        self.reward_weights = dict(reward_weights)

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` weighted sums of group-relative advantages per reward, whitened over the batch."""
        parts = self._reward_parts(experience)
        return decoupled_group_relative(
            parts, experience.group_ids, experience.loss_tokens, weights=self.reward_weights
        ).float()

    def _reward_parts(self, experience: Experience) -> dict[str, Tensor]:
        """``[N]`` float64 of every named reward: this rank's own, then the sum over ranks, each of which has its rows.

        Raises:
            ValueError: On every rank, where a trajectory of any of them lacks a reward.
        """
        own = torch.zeros(len(self.reward_weights), len(experience.rewards), dtype=torch.float64)
        num_missing = torch.zeros(len(self.reward_weights))
        for row, name in enumerate(self.reward_weights):
            for index, trajectory in zip(experience.indices, experience.trajectories, strict=True):
                parts = {"reward": trajectory.reward, **trajectory.reward_parts}
                value = parts.get(name)
                num_missing[row] += value is None
                own[row, index] = 0.0 if value is None else value
        for name, count in zip(self.reward_weights, self.sum_over_ranks(num_missing).tolist(), strict=True):
            if count:
                known = sorted({name for trajectory in experience.trajectories for name in trajectory.reward_parts})
                raise ValueError(
                    f"model.reward_weights names {name!r}, which {count:.0f} of {len(experience.rewards)} trajectories "
                    f"have no reward part of. There are {known}. Return it for every trajectory, or name another."
                )
        return dict(zip(self.reward_weights, self.sum_over_ranks(own), strict=True))
