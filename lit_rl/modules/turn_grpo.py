"""Turn-level GRPO: in a conversation every turn is judged against the same turn of the group's others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.advantages import spread_turns, turn_index, turn_mask, turn_relative, turn_returns
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule
from lit_rl.modules.option_ranges import check_number


class TurnGRPO(ClippedPolicyModule):
    """Group-relative advantages per turn.

    A turn is an unbroken run of sampled tokens. It earns what its tools gave (``Trajectory.turn_rewards``); the last
    turn also what is left of the reward. With return G_k = sum over later turns j of ``gamma``^(j - k) r_j,
    A_k = (G_k - mean) / std over the turns k of the group, and every token of the turn has it. A turn that no other
    trajectory of the group reaches has advantage 0. With one turn this is GRPO.

    Source: arXiv:2505.11821 (credit by turn); returns discounted by turn are ours.
    """

    min_group_size = 2

    def __init__(self, model_name: str, gamma: float = 1.0, normalize_std: bool = True, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            gamma: Discount per turn, in [0, 1]; tokens within a turn and answers of tools are not discounted.
            normalize_std: Divide by the standard deviation (sample form) of the group's turns.
            kwargs: Options of `ClippedPolicyModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("gamma", gamma, at_least=0, at_most=1)
        self.gamma = gamma
        self.normalize_std = normalize_std

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[B, T]`` of this rank's tokens, compared with the turns of all ranks."""
        mask = experience.loss_mask(range(len(experience)))
        own_turns = turn_index(mask).amax(1) + 1 if mask.numel() else torch.zeros(len(mask), dtype=torch.int64)
        num_turns = torch.zeros(len(experience.rewards), dtype=torch.float64)
        num_turns[experience.indices] = own_turns.double()
        most = int(self.sum_over_ranks(num_turns).max()) if len(num_turns) else 0
        exists = turn_mask(mask, most)
        # Every rank fills in its own rows; the sum over ranks has them all.
        table = torch.zeros(2, len(experience.rewards), most, dtype=torch.float64)
        table[0, experience.indices] = turn_returns(self._turn_rewards(experience, exists), exists, gamma=self.gamma)
        table[1, experience.indices] = exists.double()
        returns, all_exist = self.sum_over_ranks(table)
        advantages = turn_relative(returns, all_exist > 0, experience.group_ids, normalize_std=self.normalize_std)
        return spread_turns(advantages[experience.indices].float(), mask)

    def _turn_rewards(self, experience: Experience, exists: Tensor) -> Tensor:
        """``[B, K]`` float64 rewards of own turns that add up to each trajectory's reward."""
        rewards = torch.zeros(exists.shape, dtype=torch.float64)
        for row, trajectory in enumerate(experience.trajectories):
            num_turns = int(exists[row].sum())
            if num_turns == 0:
                continue
            assert trajectory.reward is not None
            earned = trajectory.turn_rewards[: num_turns - 1]
            rewards[row, : len(earned)] = torch.tensor(earned, dtype=torch.float64)
            rewards[row, num_turns - 1] = trajectory.reward - sum(earned)
        return rewards
