"""GPG: plain policy gradient on group-centred rewards, without ratio, clip, critic and KL."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_rl.algorithms.advantages import group_policy_gradient
from lit_rl.algorithms.policy_losses import reinforce_loss
from lit_rl.experience.batch import Experience, MicroBatch
from lit_rl.modules.option_ranges import check_number
from lit_rl.modules.policy_gradient import PolicyGradientModule


class GPG(PolicyGradientModule):
    """Group policy gradient.

    A = alpha (R - mean of the group) / ``norm``, alpha = number of trajectories over the number of those with a reward
    other than 0; the loss of a token is -A logprob.

    Source: arXiv:2504.02546.
    """

    min_group_size = 2

    def __init__(self, model_name: str, norm: float = 1.0, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            norm: The paper's F_norm, a divisor in reward units, above 0; 1 is off.
            kwargs: Options of `PolicyGradientModule`.
        """
        super().__init__(model_name, **kwargs)
        check_number("norm", norm, above=0)
        self.norm = norm

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` group-centred rewards, scaled up for trajectories that earned nothing."""
        return group_policy_gradient(experience.rewards, experience.group_ids, norm=self.norm)

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """``[B, T]`` REINFORCE loss per token."""
        return reinforce_loss(logprobs, batch.advantages)
