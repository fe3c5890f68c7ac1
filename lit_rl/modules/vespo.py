"""VESPO: a smooth weight of the sequence's ratio instead of a clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import vespo_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class VESPO(GroupRelativeModule):
    """Variational sequence-level soft policy optimization.

    With W the probability ratio of the whole sequence, the loss of a token is -phi(W) A logprob, phi(W) =
    exp(lambda (1 - W)) W^k constant: 1 on policy, fading smoothly where the sequence has become much more or much less
    likely.

    Source: arXiv:2602.10693.
    """

    def __init__(
        self,
        model_name: str,
        k_positive: float = 2.0,
        lambda_positive: float = 3.0,
        k_negative: float = 3.0,
        lambda_negative: float = 2.0,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            k_positive: How fast sequences that have become unlikely fade, for A >= 0, at least 0.
            lambda_positive: How fast sequences that have become likely fade, for A >= 0, above 0.
            k_negative: As ``k_positive``, for A < 0.
            lambda_negative: As ``lambda_positive``, for A < 0.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, **kwargs)
        for option, value in {"k_positive": k_positive, "k_negative": k_negative}.items():
            check_number(option, value, at_least=0)
        for option, value in {"lambda_positive": lambda_positive, "lambda_negative": lambda_negative}.items():
            check_number(option, value, above=0)
        self.shape = {
            "k_positive": k_positive,
            "lambda_positive": lambda_positive,
            "k_negative": k_negative,
            "lambda_negative": lambda_negative,
        }

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` weighted REINFORCE loss."""
        assert batch.old_logprobs is not None
        return vespo_loss(logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask, **self.shape)
