"""KL-Cov: keep the entropy up by holding the tokens of highest covariance near the old policy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import kl_cov_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class KLCov(GroupRelativeModule):
    """The policy gradient without a clip, and with a penalty on the tokens whose log-prob and advantage covary most.

    The loss of a token is -A r, plus ``kl_coef`` |log r| at the ``kl_cov_share`` of tokens (at least one) of highest
    covariance. They are chosen per micro-batch.

    Source: arXiv:2505.22617.
    """

    def __init__(
        self,
        model_name: str,
        kl_coef: float = 1.0,
        kl_cov_share: float = 2e-4,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            kl_coef: Weight of the penalty, at least 0; the paper's beta.
            kl_cov_share: Share of tokens penalised, in [0, 1]; the paper's k.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("kl_coef", kl_coef, at_least=0)
        check_number("kl_cov_share", kl_cov_share, at_least=0, at_most=1)
        self.kl_coef = kl_coef
        self.kl_cov_share = kl_cov_share

    @property
    def weighs_every_token(self) -> bool:
        """Covariances are taken over all tokens, those of advantage 0 among them."""
        return True

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` policy gradient and penalty per token."""
        assert batch.old_logprobs is not None
        return kl_cov_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.loss_mask,
            kl_coef=self.kl_coef,
            kl_cov_share=self.kl_cov_share,
        )
