"""REINFORCE++ and its baseline form: returns normalised over the whole batch instead of a critic."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.advantages import discounted_returns, reinforce_plus_plus_baseline
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule
from lit_rl.modules.option_ranges import check_number
from lit_rl.modules.token_rewards import TokenRewardModule


class ReinforcePlusPlus(TokenRewardModule):
    """REINFORCE with PPO's clip and a global baseline.

    The advantage of a token is its return (the reward, and KL penalties from there on, discounted by ``gamma``),
    brought to mean 0 and variance 1 over all tokens of the iteration. Works with one trajectory per prompt.

    Source: arXiv:2501.03262.
    """

    def __init__(self, model_name: str, gamma: float = 1.0, kl_reward_coef: float = 0.0, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            gamma: Discount per sampled token, in [0, 1].
            kl_reward_coef: Reward units taken off per nat of KL from the reference, at least 0; the paper uses 0.01.
            kwargs: Options of `TokenRewardModule`.
        """
        super().__init__(model_name, kl_reward_coef=kl_reward_coef, **kwargs)
        check_number("gamma", gamma, at_least=0, at_most=1)
        self.gamma = gamma

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[B, T]`` whitened returns of this rank's tokens."""
        mask = experience.loss_mask(range(len(experience)))
        returns = discounted_returns(self.token_rewards(experience), mask, gamma=self.gamma)
        return self.whiten_tokens(returns, mask)


class ReinforcePlusPlusBaseline(ClippedPolicyModule):
    """REINFORCE++ with the group's mean reward as a baseline, and one spread for all prompts.

    A = (R - mean of the group) over the standard deviation of that number over all tokens of the iteration.

    Source: arXiv:2501.03262.
    """

    min_group_size = 2

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` group-centred rewards, whitened over the batch."""
        return reinforce_plus_plus_baseline(experience.rewards, experience.group_ids, experience.loss_tokens)
