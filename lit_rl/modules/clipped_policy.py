"""The clipped surrogate as a base: what is compared with it differs from algorithm to algorithm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import clip_fractions, clipped_policy_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.option_ranges import check_number
from lit_rl.modules.policy_gradient import PolicyGradientModule


class ClippedPolicyModule(PolicyGradientModule):
    """PPO's clipped policy loss, for any advantages.

    With r the probability ratio to the policy at the start of the iteration, a token's loss is
    -min(r A, clip(r, 1 - ``clip_ratio_low``, 1 + ``clip_ratio_high``) A), and at most ``clip_ratio_c`` |A| for A < 0.

    Source: arXiv:1707.06347, eq. 7; the asymmetric clip is arXiv:2503.14476, eq. 10, the dual clip arXiv:1912.09729,
        eq. 5.
    """

    def __init__(
        self,
        model_name: str,
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.2,
        clip_ratio_c: float | None = 3.0,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            clip_ratio_low: Clip half-width below 1, in (0, 1).
            clip_ratio_high: Clip half-width above 1, above 0.
            clip_ratio_c: Bound on the ratio of negative advantages, above 1; ``null`` leaves it open.
            kwargs: Options of `PolicyGradientModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("clip_ratio_low", clip_ratio_low, above=0, below=1)
        check_number("clip_ratio_high", clip_ratio_high, above=0)
        check_number("clip_ratio_c", clip_ratio_c, above=1)
        self.clip_ratio_low = clip_ratio_low
        self.clip_ratio_high = clip_ratio_high
        self.clip_ratio_c = clip_ratio_c

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` clipped surrogate per token."""
        assert batch.old_logprobs is not None
        bounds: dict[str, Any] = {
            "clip_ratio_low": self.clip_ratio_low,
            "clip_ratio_high": self.clip_ratio_high,
            "clip_ratio_c": self.clip_ratio_c,
        }
        advantages, num_tokens = batch.advantages, batch.loss_mask.sum()
        clipped, dual_clipped = clip_fractions(
            logprobs.detach(), batch.old_logprobs, advantages, batch.loss_mask, **bounds
        )
        self.metrics.mean("actor/pg_clipfrac", clipped, num_tokens)
        self.metrics.mean("actor/pg_clipfrac_lower", dual_clipped, num_tokens)
        return clipped_policy_loss(logprobs, batch.old_logprobs, advantages, **bounds)
