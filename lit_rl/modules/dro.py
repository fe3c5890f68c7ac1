"""DRO: policy gradient with a quadratic pull towards the old policy instead of a clip."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.policy_losses import dro_loss
from lit_rl.experience.batch import MicroBatch
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_number


class DRO(GroupRelativeModule):
    """Direct reward optimization on group-relative advantages.

    The loss of a token is -(A logprob - ``beta`` / 2 (log r)^2). The pull is felt from the iteration's second update
    on: at the first one r is 1.

    Source: arXiv:2405.19107; group-relative advantages stand in for the paper's value network.
    """

    def __init__(self, model_name: str, beta: float = 1.0, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            beta: The paper's tau, strength of the pull in advantage units per nat, above 0. With 1 an advantage of 0.2
                is balanced where the token's log-probability has moved by 0.2.
            kwargs: Options of `GroupRelativeModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("beta", beta, above=0)
        self.beta = beta

    @property
    def weighs_every_token(self) -> bool:
        """The pull holds tokens without an advantage, too."""
        return True

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` REINFORCE loss plus the squared log-ratio."""
        assert batch.old_logprobs is not None
        return dro_loss(logprobs, batch.old_logprobs, batch.advantages, beta=self.beta)
