"""SAPO: soft adaptive policy optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import sapo_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class SAPO(GroupRelativeModule):
    """Fades the gradient out smoothly instead of clipping it.

    The loss of a token is -A sigmoid(tau (r - 1)) 4 / tau: the unclipped gradient at r = 1, less the further r is away.

    Source: arXiv:2511.20347.
    """

    def __init__(
        self,
        model_name: str,
        tau_positive: float = 1.0,
        tau_negative: float = 1.05,
        loss_agg_mode: str = "seq-mean-token-mean",
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            tau_positive: Temperature where A > 0, above 0; larger fades faster.
            tau_negative: Temperature elsewhere, above 0; the paper sets it higher, for stability.
            loss_agg_mode: How token losses become one number.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, loss_agg_mode=loss_agg_mode, **kwargs)
        check_number("tau_positive", tau_positive, above=0)
        check_number("tau_negative", tau_negative, above=0)
        self.tau_positive = tau_positive
        self.tau_negative = tau_negative

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` gated loss per token."""
        assert batch.old_logprobs is not None
        return sapo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            tau_positive=self.tau_positive,
            tau_negative=self.tau_negative,
        )
