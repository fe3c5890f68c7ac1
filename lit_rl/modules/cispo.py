"""CISPO: clip the importance weight, not the update."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import cispo_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class CISPO(GroupRelativeModule):
    """Clipped importance-sampling-weight policy optimization.

    The loss of a token is -clip(r, 1 - ``clip_ratio_low``, 1 + ``clip_ratio_high``) A logprob with the clipped ratio
    held constant: unlike under PPO's clip, every token keeps a gradient.

    Source: arXiv:2506.13585.
    """

    def __init__(
        self,
        model_name: str,
        clip_ratio_low: float = 1.0,
        clip_ratio_high: float = 0.2,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            clip_ratio_low: Half-width below 1, in [0, 1]; at 1, as in the paper, there is no lower bound.
            clip_ratio_high: Half-width above 1, above 0; the paper tunes it and gives no number.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("clip_ratio_low", clip_ratio_low, at_least=0, at_most=1)
        check_number("clip_ratio_high", clip_ratio_high, above=0)
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` weighted REINFORCE loss per token."""
        assert batch.old_logprobs is not None
        return cispo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
        )
