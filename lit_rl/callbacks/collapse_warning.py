"""Early signs that a policy is collapsing, said while there is time to stop the run.

Multi-turn reinforcement learning tends to fail slowly: rewards still look well while entropy is gone, responses grow or
shrink, trainer and engine drift apart, or no group teaches anything. The numbers are in the log anyway; this callback
only watches them and says once, per sign, what it means. It never stops a run.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)

_ENTROPY, _GAP = "actor/entropy", "rollout_corr/logprob_gap_mean"
_LENGTH, _NO_SPREAD, _REWARD = "response_length/mean", "critic/zero_spread_group_share", "critic/score/mean"


class CollapseWarning(Callback):
    """Warn when means over the last iterations leave their range; again only after they have come back.

    Args:
        window: Iterations averaged, at least 1; the first window is what later ones are compared with.
        min_entropy: Entropy below it, in nats per token, leaves nothing to explore.
        max_logprob_gap: Mean difference of trainer and engine above it, in nats per token.
        max_length_factor: Responses so many times longer or shorter than at first, above 1.
        max_zero_spread_share: Share of groups with equal rewards above it, in [0, 1].
        max_reward_drop: Reward so far below its best window, in reward units.

    Raises:
        ValueError: If an option is out of its range.
    """

    def __init__(
        self,
        window: int = 5,
        min_entropy: float = 0.005,
        max_logprob_gap: float = 0.1,
        max_length_factor: float = 2.0,
        max_zero_spread_share: float = 0.9,
        max_reward_drop: float = 0.25,
    ) -> None:
        if window < 1:
            raise ValueError(f"CollapseWarning.window={window} must be at least 1.")
        if not max_length_factor > 1:
            raise ValueError(f"CollapseWarning.max_length_factor={max_length_factor} must be above 1.")
        self.window = window
        self.min_entropy = min_entropy
        self.max_logprob_gap = max_logprob_gap
        self.max_length_factor = max_length_factor
        self.max_zero_spread_share = max_zero_spread_share
        self.max_reward_drop = max_reward_drop
        self._recent: dict[str, deque[float]] = {}
        self._first_length: float | None = None
        self._best_reward: float | None = None
        self._warned: set[str] = set()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the iteration's numbers."""
        for message in self.watch(trainer.callback_metrics):
            log.warning("Iteration %d: %s", trainer.current_epoch, message)

    def watch(self, logged: Mapping[str, Any]) -> list[str]:
        """Take one iteration's metrics; returns the warnings that are new.

        Args:
            logged: Metrics by name, as numbers or scalar tensors.
        """
        means: dict[str, float] = {}
        for name in (_ENTROPY, _GAP, _LENGTH, _NO_SPREAD, _REWARD):
            if name in logged:
                recent = self._recent.setdefault(name, deque(maxlen=self.window))
                recent.append(float(logged[name]))
                if len(recent) == self.window:
                    means[name] = sum(recent) / self.window
        signs = self._signs(means)
        new = [message for name, message in signs.items() if name not in self._warned]
        self._warned = set(signs)
        return new

    def _signs(self, means: Mapping[str, float]) -> dict[str, str]:
        signs: dict[str, str] = {}
        if means.get(_ENTROPY, self.min_entropy) < self.min_entropy:
            signs[_ENTROPY] = (
                f"{_ENTROPY} is {means[_ENTROPY]:.4f}, below {self.min_entropy}: the policy hardly explores any more. "
                "If the reward has stopped rising, raise model.entropy_coef or lower model.actor_lr."
            )
        if means.get(_GAP, 0.0) > self.max_logprob_gap:
            signs[_GAP] = (
                f"{_GAP} is {means[_GAP]:.3f}, above {self.max_logprob_gap}: trainer and engine disagree about the "
                "policy. Set model.rollout_correction, or serve in the trainer's precision."
            )
        if means.get(_NO_SPREAD, 0.0) > self.max_zero_spread_share:
            signs[_NO_SPREAD] = (
                f"{_NO_SPREAD} is {means[_NO_SPREAD]:.2f}, above {self.max_zero_spread_share}: nearly no group teaches "
                "anything. Take other questions, a larger data.group_size, or data.dynamic_sampling_rounds."
            )
        signs |= self._length_sign(means) | self._reward_sign(means)
        return signs

    def _length_sign(self, means: Mapping[str, float]) -> dict[str, str]:
        if _LENGTH not in means:
            return {}
        if self._first_length is None:
            self._first_length = max(means[_LENGTH], 1.0)
        factor = means[_LENGTH] / self._first_length
        if 1 / self.max_length_factor <= factor <= self.max_length_factor:
            return {}
        return {
            _LENGTH: f"{_LENGTH} is {means[_LENGTH]:.0f}, {factor:.1f} times that of the first iterations "
            f"({self._first_length:.0f}). Read the run's trajectories/: does it repeat itself, or give up early?"
        }

    def _reward_sign(self, means: Mapping[str, float]) -> dict[str, str]:
        if _REWARD not in means:
            return {}
        self._best_reward = max(self._best_reward or means[_REWARD], means[_REWARD])
        if self._best_reward - means[_REWARD] <= self.max_reward_drop:
            return {}
        return {
            _REWARD: f"{_REWARD} is {means[_REWARD]:.2f}, its best was {self._best_reward:.2f}. Go back to the "
            "checkpoint of that time with a lower model.actor_lr."
        }
