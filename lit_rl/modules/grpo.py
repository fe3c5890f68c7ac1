"""GRPO: group-relative advantages and the clipped loss."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from lit_rl.algorithms.advantages import group_relative, zero_spread_share
from lit_rl.algorithms.policy_losses import clip_fractions, clipped_policy_loss
from lit_rl.experience.batch import Experience, MicroBatch
from lit_rl.modules.option_ranges import check_number
from lit_rl.modules.policy_gradient import PolicyGradientModule

log = logging.getLogger(__name__)


class GRPO(PolicyGradientModule):
    """Group Relative Policy Optimization.

    A trajectory's advantage is its reward minus its group's mean, over the group's standard deviation; the loss is
    PPO's clipped surrogate. Failed trajectories are in no group; a group of one has advantage 0.

    Source: arXiv:2402.03300, eq. 3; the asymmetric clip is arXiv:2503.14476, eq. 10, the dual clip arXiv:1912.09729,
        eq. 5.
    """

    def __init__(
        self,
        model_name: str,
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        clip_ratio_c: float | None = 3.0,
        normalize_std: bool = True,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            clip_ratio_low: Clip half-width below 1, in (0, 1).
            clip_ratio_high: Clip half-width above 1, above 0.
            clip_ratio_c: Bound on the loss of negative advantages, above 1; ``null`` leaves it open.
            normalize_std: Divide by the group's standard deviation (sample form); off is Dr. GRPO's advantage.
            kwargs: Options of `PolicyGradientModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("clip_ratio_low", clip_ratio_low, above=0, below=1)
        check_number("clip_ratio_high", clip_ratio_high, above=0)
        check_number("clip_ratio_c", clip_ratio_c, above=1)
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high
        self.clip_ratio_c = clip_ratio_c
        self.normalize_std = normalize_std

    def setup(self, stage: str) -> None:
        """Warn of groups that can teach nothing."""
        super().setup(stage)
        if stage == "fit" and getattr(self.trainer.datamodule, "group_size", None) == 1:  # type: ignore[attr-defined]
            log.warning(
                "data.group_size=1: every advantage is 0 and the policy learns nothing from its rewards, since GRPO "
                "compares the trajectories of one prompt with each other. Set data.group_size to at least 2."
            )

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` group-relative advantages of all ranks' trajectories."""
        share = zero_spread_share(experience.rewards, experience.group_ids)
        self.metrics.mean("critic/zero_spread_group_share", share)
        return group_relative(experience.rewards, experience.group_ids, normalize_std=self.normalize_std)

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` clipped surrogate per token."""
        assert batch.old_logprobs is not None
        upper, lower = clip_fractions(
            logprobs.detach(),
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            clip_ratio_c=self.clip_ratio_c,
        )
        num_tokens = batch.loss_mask.sum()
        self.metrics.mean("actor/pg_clipfrac", upper, num_tokens)
        self.metrics.mean("actor/pg_clipfrac_lower", lower, num_tokens)
        return clipped_policy_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            clip_ratio_c=self.clip_ratio_c,
        )
