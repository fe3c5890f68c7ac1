"""DPPO: a trust region on probabilities instead of on their ratio."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import dppo_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_choice, check_number


class DPPO(GroupRelativeModule):
    """Divergence proximal policy optimization.

    The loss of a token is -min(r, ``ratio_cap``) A logprob with the ratio constant, and 0 once the token has left the
    trust region in the direction that A pushes it. A rare token may multiply its probability in one iteration, a likely
    one may not lose its own.

    Source: arXiv:2602.04879.
    """

    def __init__(
        self,
        model_name: str,
        divergence: str = "tv",
        threshold_low: float = 0.2,
        threshold_high: float = 0.2,
        ratio_cap: float = 20.0,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            divergence: ``tv``: change of the probability; ``kl``: KL divergence of "this token or another", nats.
            threshold_low: Largest distance downwards, at least 0; about 0.05 with ``kl``.
            threshold_high: Largest distance upwards, at least 0.
            ratio_cap: Largest ratio, above 0.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("threshold_low", threshold_low, at_least=0)
        check_number("threshold_high", threshold_high, at_least=0)
        check_number("ratio_cap", ratio_cap, above=0)
        check_choice("divergence", divergence, ("tv", "kl"))
        self.divergence = divergence
        self.threshold_low = threshold_low
        self.threshold_high = threshold_high
        self.ratio_cap = ratio_cap

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` loss per token, 0 outside the trust region."""
        assert batch.old_logprobs is not None
        return dppo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            divergence=self.divergence,
            threshold_low=self.threshold_low,
            threshold_high=self.threshold_high,
            ratio_cap=self.ratio_cap,
        )
