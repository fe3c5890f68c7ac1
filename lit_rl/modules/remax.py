"""ReMax: the baseline is the reward of one greedy answer to the same prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.advantages import remax
from lit_rl.experience.batch import Experience
from lit_rl.modules.token_rewards import TokenRewardModule


class ReMax(TokenRewardModule):
    """REINFORCE with the greedy answer's reward as baseline.

    A = reward-to-go - reward of the greedy trajectory of the same prompt, which ``data.greedy_baseline=true`` rolls out
    besides the sampled ones; it is not learnt from. Works with one trajectory per prompt. Where the greedy trajectory
    failed, its prompt's trajectories have A = 0.

    Source: arXiv:2310.10505.
    """

    def check_data(self, data: Any) -> None:
        """Refuse data without greedy rollouts."""
        super().check_data(data)
        if not data.greedy_baseline:
            raise ValueError(
                "data.greedy_baseline=False: ReMax needs the reward of a greedy trajectory per prompt. "
                "Set data.greedy_baseline=true."
            )

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[B, T]`` reward-to-go minus the prompt's greedy reward."""
        assert experience.greedy_rewards is not None
        own = experience.indices
        mask = experience.loss_mask(range(len(experience)))
        greedy = experience.greedy_rewards[own]
        advantages, _ = remax(self.token_rewards(experience), greedy.nan_to_num(), mask)
        return torch.where(greedy.isnan().unsqueeze(1), 0.0, advantages)
