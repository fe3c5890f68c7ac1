"""PF-PPO: PPO on trajectories that are drawn by how much their reward can be trusted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.policy_filtration import FILTRATION_METHODS, draw_counts, filtration_weights
from lit_rl.experience.batch import Experience, MicroBatch, MiniBatch
from lit_rl.modules.option_ranges import check_choice, check_number
from lit_rl.modules.ppo import PPO


class PFPPO(PPO):
    """Policy-filtration proximal policy optimization.

    After advantages are known, the iteration's N trajectories are replaced by N draws with replacement, likelier where
    the reward is trusted: every loss of a trajectory, the critic's too, counts as often as it was drawn. What the
    losses are divided by stays. A moderately good reward of a reward model is the least reliable one.

    Source: arXiv:2409.06957.
    """

    def __init__(self, model_name: str, filtration: str = "pow", power: float = 2.0, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            filtration: ``pow``: drawn by ``|R|^power``; ``max-min``: only the highest and the lowest reward;
                ``max-random``: the highest four times as likely as the others.
            power: Exponent of ``pow``, at least 0; with rewards of 0 and 1 only the right answers are left.
            kwargs: Options of `PPO`.
        """
        super().__init__(model_name, **kwargs)
        check_choice("filtration", filtration, FILTRATION_METHODS)
        check_number("power", power, at_least=0)
        self.filtration = filtration
        self.power = power
        self._counts = torch.zeros(0)

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[B, T]`` PPO's advantages; also draws the iteration's trajectories, the same on every rank."""
        weights = filtration_weights(experience.rewards, method=self.filtration, power=self.power)
        self._counts = draw_counts(weights, torch.Generator().manual_seed(experience.iteration)).float()
        return super().compute_advantages(experience)

    def aggregate(self, token_values: Tensor, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        """Scalar summand, each trajectory as often as it was drawn."""
        indices = [batch.experience.indices[position] for position in batch.positions]
        counts = self._counts[indices].to(token_values.device).unsqueeze(1)  # [B, 1]
        return super().aggregate(token_values * counts, batch, mini_batch)
