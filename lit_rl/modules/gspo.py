"""GSPO: group sequence policy optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import gspo_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class GSPO(GroupRelativeModule):
    """Clips one length-normalised probability ratio per sequence.

    s = exp(mean over the sequence's tokens of logprob - old logprob); the loss of a token is
    -min(s A, clip(s, 1 - ``clip_ratio_low``, 1 + ``clip_ratio_high``) A), with the gradient of its own log-prob.

    Source: arXiv:2507.18071.
    """

    def __init__(
        self,
        model_name: str,
        clip_ratio_low: float = 3e-4,
        clip_ratio_high: float = 4e-4,
        loss_agg_mode: str = "seq-mean-token-mean",
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            clip_ratio_low: Clip half-width below 1, in [0, 1]; far below PPO's, since s is a mean over many tokens.
            clip_ratio_high: Clip half-width above 1, above 0.
            loss_agg_mode: How token losses become one number.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, loss_agg_mode=loss_agg_mode, **kwargs)
        check_number("clip_ratio_low", clip_ratio_low, at_least=0, at_most=1)
        check_number("clip_ratio_high", clip_ratio_high, above=0)
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` clipped loss with the sequence's ratio at every token."""
        assert batch.old_logprobs is not None
        return gspo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
        )
