"""Clip-Cov: keep the entropy up by leaving a few tokens of high covariance out of the update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.policy_losses import clip_cov_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class ClipCov(GroupRelativeModule):
    """GRPO's loss without the gradient of some tokens whose log-prob and advantage covary most.

    Of the tokens with (logprob - mean) (A - mean) between ``clip_cov_low`` and ``clip_cov_high``, a random
    ``clip_cov_share`` of all tokens (at least one) is left out. Means and draws are those of a micro-batch.

    Source: arXiv:2505.22617.
    """

    def __init__(
        self,
        model_name: str,
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        clip_cov_share: float = 2e-4,
        clip_cov_low: float = 1.0,
        clip_cov_high: float = 5.0,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            clip_ratio_low: Clip half-width below 1, in [0, 1].
            clip_ratio_high: Clip half-width above 1, above 0.
            clip_cov_share: Share of tokens left out, in [0, 1]; the paper's r.
            clip_cov_low: Covariance above which a token may be left out, nats times advantage units; omega_low.
            clip_cov_high: Covariance below which it may be; omega_high.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("clip_ratio_low", clip_ratio_low, at_least=0, at_most=1)
        check_number("clip_cov_share", clip_cov_share, at_least=0, at_most=1)
        check_number("clip_ratio_high", clip_ratio_high, above=0)
        check_number("clip_cov_high", clip_cov_high, above=clip_cov_low)
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high
        self.clip_cov_share = clip_cov_share
        self.clip_cov_low = clip_cov_low
        self.clip_cov_high = clip_cov_high

    @property
    def weighs_every_token(self) -> bool:
        """Covariances are taken over all tokens, those of advantage 0 among them."""
        return True

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` clipped loss, 0 at the tokens left out."""
        assert batch.old_logprobs is not None
        # A function of step and rows, not of a state: a resumed run draws the same tokens.
        seed = self.global_step * 1_000_003 + sum(batch.positions)
        return clip_cov_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            generator=torch.Generator().manual_seed(seed),
            clip_ratio_low=self.clip_ratio_low,
            clip_ratio_high=self.clip_ratio_high,
            clip_cov_share=self.clip_cov_share,
            clip_cov_low=self.clip_cov_low,
            clip_cov_high=self.clip_cov_high,
        )
