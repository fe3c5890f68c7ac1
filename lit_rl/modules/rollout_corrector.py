"""Apply a rollout correction to the losses of micro-batches.

Position in the flow: policy loss per token -> **weights and rejections** -> aggregation. The mathematics is in
`lit_rl.algorithms.importance`. Rejected tokens lose their loss and still count in what the loss is divided by: in
bypass mode what is rejected changes from step to step, so no count over all ranks could be known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.importance import correct_rollout, rollout_correction
from lit_rl.algorithms.policy_losses import reinforce_loss
from lit_rl.experience.batch import Experience, MicroBatch
from lit_rl.metrics.policy import PolicyMetrics


class RolloutCorrector:
    """Corrects the gap between trainer and engine as a preset says.

    Args:
        preset: A key of `lit_rl.algorithms.importance.PRESETS`.
        cap: Largest weight, where the preset truncates weights.
        metrics: Where ``rollout_corr/*`` goes.
    """

    def __init__(self, preset: str, cap: float, metrics: PolicyMetrics) -> None:
        self.is_off = preset == "off"
        preset_correction = rollout_correction(preset, cap=cap)
        self.normalize = preset_correction.normalize
        self.correction = replace(preset_correction, normalize=False)
        self.metrics = metrics
        self._mean_weight = 1.0

    @property
    def bypass(self) -> bool:
        """Whether the engine's log-probs stand in for the old ones."""
        return self.correction.bypass

    def measure(self, experience: Experience, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Take the mean weight of the iteration's tokens, which normalised weights are divided by."""
        if not self.normalize:
            return
        positions = range(len(experience))
        weights, kept = correct_rollout(
            experience.padded("old_logprobs", positions),
            experience.padded("rollout_logprobs", positions),
            experience.loss_mask(positions),
            self.correction,
        )
        assert weights is not None
        total, count = sum_over_ranks(torch.stack([weights.double().sum(), kept.double().sum()])).tolist()
        self._mean_weight = total / count if total > 0 else 1.0

    def token_loss(
        self, logprobs: Tensor, batch: MicroBatch, policy_loss: Callable[[Tensor, MicroBatch], Tensor]
    ) -> Tensor:
        """Return ``[B, T]`` corrected token losses.

        With bypass and weights the loss is REINFORCE, -w A logprobs, with the weight of the current policy: a loss
        around the engine's log-probs contains the correction already.

        Args:
            logprobs: ``[B, T]`` of the current policy, with gradient.
            batch: Its old log-probs are the engine's where they are bypassed.
            policy_loss: The algorithm's.
        """
        if self.is_off:
            return policy_loss(logprobs, batch)
        assert batch.old_logprobs is not None
        mask = batch.loss_mask
        trainer_logprobs = logprobs.detach() if self.bypass else batch.old_logprobs
        weights, kept = correct_rollout(trainer_logprobs, batch.rollout_logprobs, mask, self.correction)
        if weights is None or not self.bypass:
            loss = policy_loss(logprobs, batch)
        else:
            loss = reinforce_loss(logprobs, batch.advantages)
        self.metrics.mean("rollout_corr/rejected_share", masked_mean((mask & ~kept).float(), mask), mask.sum())
        if weights is not None:
            weights = weights / self._mean_weight
            self.metrics.mean("rollout_corr/weight_mean", masked_mean(weights, mask), mask.sum())
            loss = loss * weights
        return torch.where(kept, loss, 0.0)
