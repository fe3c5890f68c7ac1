"""GMPO: geometric-mean policy optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import gmpo_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class GMPO(GroupRelativeModule):
    """Takes the geometric instead of the arithmetic mean of a sequence's clipped token ratios.

    The loss of a sequence is -A exp(mean over its tokens of clip(log r, -``clip_ratio_low``, ``clip_ratio_high``)),
    where only the bound in the direction of A is active. Outliers of single tokens count less than in GRPO.

    Source: arXiv:2507.20673.
    """

    def __init__(
        self,
        model_name: str,
        clip_ratio_low: float = 0.4,
        clip_ratio_high: float = 0.4,
        loss_agg_mode: str = "seq-mean-token-mean",
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            clip_ratio_low: Largest fall of a token's log-prob that still counts where A < 0, nats, at least 0.
            clip_ratio_high: Largest rise where A > 0, nats, at least 0.
            loss_agg_mode: How token losses become one number.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, loss_agg_mode=loss_agg_mode, **kwargs)
        check_number("clip_ratio_low", clip_ratio_low, at_least=0)
        check_number("clip_ratio_high", clip_ratio_high, at_least=0)
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]``: the sequence's loss at every token."""
        assert batch.old_logprobs is not None
        return gmpo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
        )
