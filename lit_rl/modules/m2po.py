"""M2PO: a bound on the second moment of the log-ratios, for data of much older policies."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.policy_losses import m2po_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class M2PO(GroupRelativeModule):
    """Second-moment trust policy optimization.

    The loss of a token is -r A, and 0 at the tokens of largest (log r)^2, as many as must go for the mean over the
    others to be at most ``m2_threshold``. They are chosen per micro-batch. For stale data compare with the engine's
    policy: ``rollout_correction=bypass``.

    Source: arXiv:2510.01161.
    """

    def __init__(self, model_name: str, m2_threshold: float = 0.04, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            m2_threshold: The paper's tau_M2, nats squared, above 0.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("m2_threshold", m2_threshold, above=0)
        self.m2_threshold = m2_threshold

    @property
    def weighs_every_token(self) -> bool:
        """The second moment is taken over tokens without an advantage, too."""
        return True

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` unclipped surrogate, 0 where dropped."""
        assert batch.old_logprobs is not None
        loss = m2po_loss(logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, threshold=self.m2_threshold)
        moments = (logprobs.detach() - batch.old_logprobs).square()
        self.metrics.mean("actor/second_moment", masked_mean(moments, batch.loss_mask), batch.loss_mask.sum())
        return loss
