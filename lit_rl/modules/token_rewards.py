"""Token-level rewards as a base: the trajectory's reward at its last sampled token, less a KL penalty at every token.

Position in the flow: scoring -> **token rewards** -> returns or GAE -> advantages per token. The coefficient of the
penalty is fixed or follows a target; the controller that moves it goes into checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.advantages import rewards_at_last_token, whiten
from lit_rl.algorithms.kl import AdaptiveKLController, FixedKLController, kl_in_reward, kl_penalty
from lit_rl.experience.batch import Experience
from lit_rl.modules.clipped_policy import ClippedPolicyModule


class TokenRewardModule(ClippedPolicyModule):
    """Base of algorithms whose advantages differ from token to token."""

    def __init__(
        self,
        model_name: str,
        kl_reward_coef: float = 0.0,
        kl_reward_target: float | None = None,
        kl_reward_horizon: float = 10_000,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            kl_reward_coef: Reward units taken off per nat of KL from the reference (k1), at least 0; 0 is off and loads
                no reference. With a target it is the first value.
            kl_reward_target: KL per token, nats, above 0, that the coefficient is adapted to; ``null`` keeps it fixed.
            kl_reward_horizon: Sequences in which it adapts, above 0; larger is slower. Source: arXiv:1909.08593.
            kwargs: Options of `ClippedPolicyModule`.
        """
        super().__init__(model_name, **kwargs)
        self.kl_reward_coef = kl_reward_coef
        self.kl_controller: FixedKLController | AdaptiveKLController = (
            FixedKLController(kl_reward_coef)
            if kl_reward_target is None
            else AdaptiveKLController(kl_reward_coef, kl_reward_target, kl_reward_horizon)
        )

    @property
    def needs_reference(self) -> bool:
        """For a KL term in the loss or in the reward."""
        return super().needs_reference or self.kl_reward_coef != 0

    def needs_old_logprobs(self, experience: Experience) -> bool:
        """For a KL term in the reward, beside the usual reasons."""
        return super().needs_old_logprobs(experience) or self.kl_reward_coef != 0

    def token_rewards(self, experience: Experience) -> Tensor:
        """``[B, T]`` float32 rewards of this rank's tokens, 0 where the policy sampled none.

        Moves the KL coefficient, so it is called once per iteration.
        """
        positions = range(len(experience))
        mask = experience.loss_mask(positions)
        rewards = rewards_at_last_token(experience.rewards[experience.indices], mask)
        if self.kl_reward_coef == 0:
            return rewards
        old, ref = experience.padded("old_logprobs", positions), experience.padded("ref_logprobs", positions)
        coefficient = self.kl_controller.kl_coef
        num_tokens, total = self.sum_over_ranks(
            torch.stack([mask.sum().double(), (kl_penalty(old, ref, "k1") * mask).double().sum()])
        ).tolist()
        if num_tokens > 0:
            self.metrics.mean("actor/reward_kl_penalty", total / num_tokens)
            self.metrics.mean("actor/reward_kl_penalty_coeff", coefficient)
            self.kl_controller.update(total / num_tokens, num_sequences=len(experience.rewards))
        return kl_in_reward(rewards, old, ref, mask, coefficient)

    def whiten_tokens(self, values: Tensor, mask: Tensor) -> Tensor:
        """Bring ``[B, T]`` values to mean 0 and variance 1 over all ranks' tokens; fewer than two are left alone."""
        kept = values[mask].double()
        num_tokens, total = self.sum_over_ranks(torch.stack([mask.sum().double(), kept.sum()]))
        if num_tokens < 2:
            return torch.where(mask, values, 0.0)
        mean = total / num_tokens
        squares = self.sum_over_ranks((kept - mean).square().sum())
        return whiten(values, mask, mean=mean, std=(squares / (num_tokens - 1)).sqrt())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the KL coefficient."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["lit_rl_kl_controller"] = self.kl_controller.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the KL coefficient, where it is an adapted one."""
        super().on_load_checkpoint(checkpoint)
        # Weights of an algorithm without such a coefficient may be gone on with.
        if "lit_rl_kl_controller" in checkpoint:
            self.kl_controller.load_state_dict(checkpoint["lit_rl_kl_controller"])
