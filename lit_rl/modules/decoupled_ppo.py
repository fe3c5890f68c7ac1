"""Decoupled PPO: the policy that sampled and the policy that bounds the step are two, for stale rollouts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.importance.weights import LEVELS
from lit_rl.algorithms.policy_losses import decoupled_policy_loss
from lit_rl.experience.batch import Experience, MicroBatch
from lit_rl.modules.grpo import GRPO
from lit_rl.modules.option_ranges import check_choice, check_number


class DecoupledPPO(GRPO):
    """PPO around the trainer's policy at the start of the iteration, weighed for the policy that sampled.

    A token's loss is min(pi_old / pi_rollout, ``importance_cap``) times the clipped loss around pi_old, where
    pi_rollout are the engine's log-probs, possibly of older weights. Advantages are GRPO's.

    Source: arXiv:2110.00641; for language models arXiv:2505.24298.
    """

    def __init__(
        self, model_name: str, importance_cap: float = 2.0, importance_level: str = "token", **kwargs: Any
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            importance_cap: Largest weight, above 0.
            importance_level: ``token``, ``sequence`` (product over the sequence) or ``geometric`` (its mean).
            kwargs: Options of `GRPO`, without ``rollout_correction``, which would weigh the loss a second time.
        """
        super().__init__(model_name, **kwargs)
        check_number("importance_cap", importance_cap, above=0)
        check_choice("importance_level", importance_level, LEVELS)
        if kwargs.get("rollout_correction", "off") != "off":
            raise ValueError(
                f"model.rollout_correction={kwargs['rollout_correction']!r}: DecoupledPPO has its own importance "
                "weight. Leave it 'off', or use GRPO with the preset."
            )
        self.importance_cap = importance_cap
        self.importance_level = importance_level

    def needs_old_logprobs(self, experience: Experience) -> bool:
        """Always: they are one of the three policies."""
        return True

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` weighed clipped loss per token."""
        assert batch.old_logprobs is not None
        return decoupled_policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.rollout_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            clip_ratio_c=self.clip_ratio_c,
            level=self.importance_level,
            cap=self.importance_cap,
        )
