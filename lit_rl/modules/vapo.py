"""VAPO: PPO with a critic made fit for long answers of very different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.advantages import gae, length_adaptive_lambda
from lit_rl.experience.batch import MicroBatch, MiniBatch
from lit_rl.modules.option_ranges import check_number
from lit_rl.modules.ppo import PPO


class VAPO(PPO):
    """Value-augmented proximal policy optimization.

    PPO with: the critic fitted to returns of its own lambda, ``critic_lam``; the policy's lambda 1 - 1 / (``alpha`` l)
    for an answer of l tokens; the higher upper clip; and -``nll_coef`` mean(logprob) over the tokens of right answers
    added to the loss. The paper also warms the critic up (``critic_warmup_iterations``) and takes several answers per
    prompt (``data.group_size``).

    Source: arXiv:2504.05118.
    """

    def __init__(
        self,
        model_name: str,
        alpha: float = 0.05,
        critic_lam: float = 1.0,
        nll_coef: float = 0.1,
        right_reward: float = 1.0,
        clip_ratio_high: float = 0.28,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            alpha: Share of an answer that credit reaches over, above 0; below 1 / alpha tokens the policy's lambda is
                0. ``lam`` is not used.
            critic_lam: Lambda of the returns that the critic is fitted to, in [0, 1]; 1 is unbiased.
            nll_coef: The paper's mu, weight of the log-likelihood of right answers, at least 0.
            right_reward: Smallest reward of an answer that counts as right.
            clip_ratio_high: Clip half-width above 1, above 0.
            kwargs: Options of `PPO`.
        """
        super().__init__(model_name, clip_ratio_high=clip_ratio_high, **kwargs)
        check_number("alpha", alpha, above=0)
        check_number("critic_lam", critic_lam, at_least=0, at_most=1)
        check_number("nll_coef", nll_coef, at_least=0)
        check_number("right_reward", right_reward)
        self.alpha, self.critic_lam = alpha, critic_lam
        self.nll_coef, self.right_reward = nll_coef, right_reward
        self._right_token_factor = 0.0

    def estimate(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages with the policy's lambda, returns with the critic's."""
        lam = length_adaptive_lambda(mask.sum(1), alpha=self.alpha)
        advantages, _ = gae(rewards, values, mask, gamma=self.gamma, lam=lam)
        _, returns = gae(rewards, values, mask, gamma=self.gamma, lam=self.critic_lam)
        return advantages, returns

    def micro_batch_loss(self, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        """PPO's, with right answers' tokens weighed so that their term is a mean over them (in ``token-mean``)."""
        members = [i for indices in mini_batch.plan.micro_batches for share in indices for i in share]
        experience = mini_batch.experience
        is_right = experience.rewards[members] >= self.right_reward
        num_right_tokens = int(experience.loss_tokens[members][is_right].sum())
        self._right_token_factor = mini_batch.plan.num_loss_tokens / num_right_tokens if num_right_tokens else 0.0
        return super().micro_batch_loss(batch, mini_batch)

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` clipped surrogate, plus the negative log-likelihood of right answers."""
        loss = super().policy_loss(logprobs, batch)
        rewards = torch.tensor([batch.experience.trajectories[position].reward for position in batch.positions])
        is_right = (rewards >= self.right_reward).to(loss.device).unsqueeze(1)  # [B, 1]
        return loss - self.nll_coef * self._right_token_factor * torch.where(is_right, logprobs, 0.0)
