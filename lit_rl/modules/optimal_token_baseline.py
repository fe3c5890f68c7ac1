"""Optimal token baseline: per time step, the baseline of least variance over the group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.advantages import optimal_token_baseline
from lit_rl.algorithms.groups import Groups
from lit_rl.experience.batch import Experience, MicroBatch
from lit_rl.modules.option_ranges import check_number
from lit_rl.modules.token_rewards import TokenRewardModule


class OptimalTokenBaseline(TokenRewardModule):
    """PPO's clipped loss on returns minus a variance-minimising baseline per time step.

    A_t = G_t - sum_i(W_it G_it) / sum_i(W_it) over the trajectories i of the group that reach step t; W is the running
    sum of 1 - 2 pi + sum(pi^2), the expected squared gradient of each token. Steps count sampled tokens only, so
    answers of tools do not shift conversations against each other. Costs one more forward pass per iteration.

    Source: arXiv:2602.07078.
    """

    min_group_size = 2

    def __init__(self, model_name: str, gamma: float = 1.0, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            gamma: Discount per sampled token, in [0, 1].
            kwargs: Options of `TokenRewardModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("gamma", gamma, at_least=0, at_most=1)
        self.gamma = gamma

    def score_more(self, experience: Experience) -> None:
        """Score how concentrated the policy's distributions are."""
        self.score_column("sum_pi_squared", experience, self._sum_pi_squared, timer="sum_pi_squared")

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[B, T]`` returns of this rank's tokens minus the baseline over all ranks' trajectories."""
        positions = range(len(experience))
        groups = Groups.from_ids(experience.group_ids)
        advantages, _ = optimal_token_baseline(
            self.token_rewards(experience),
            experience.loss_mask(positions),
            groups.index[experience.indices],
            experience.padded("rollout_logprobs", positions),
            experience.padded("sum_pi_squared", positions),
            gamma=self.gamma,
            num_groups=groups.num_groups,
            num_steps=int(experience.loss_tokens.max()) if len(experience.loss_tokens) else 0,
            sum_over_ranks=self.sum_over_ranks,
        )
        return advantages

    def _sum_pi_squared(self, batch: MicroBatch) -> Tensor:
        scores = self.forward_actor(batch, with_entropy=False, with_sum_pi_squared=True)
        assert scores.sum_pi_squared is not None
        return scores.sum_pi_squared
