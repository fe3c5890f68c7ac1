"""The few numbers of an iteration that a person follows, read from what the module logged under verl's names.

Progress display and reward plot both start here. Nothing is computed: what was not logged is ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from lightning.pytorch import LightningModule

_PHASES_S = {
    "rollout": "timing_s/gen",
    "scoring": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "sync": "timing_s/update_weights",
    "total": "timing_s/step",
}
_VALIDATION_PREFIX = "val-core/"
_VALIDATION_SUFFIX = "/reward/mean@1"


@dataclass(kw_only=True)
class IterationMetrics:
    """One finished iteration.

    Attributes:
        iteration: Its index, from 0.
        reward: Mean over the trajectories trained on.
        response_length: Mean tokens after the prompt.
        seconds: Seconds by phase, of those that were timed.
        validation_reward: Mean reward by data source; empty without a validation in this iteration.
        loss: Of supervised fine-tuning, in nats per token.
        validation_loss: Of held-out conversations, in nats per token.
        validation_accuracy: Share of their tokens that are the model's first choice.
    """

    iteration: int
    reward: float | None = None
    response_length: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    validation_reward: dict[str, float] = field(default_factory=dict)
    loss: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None


def read_iteration(iteration: int, logged: Mapping[str, Any], *, validated: bool) -> IterationMetrics:
    """Pick the numbers of one iteration out of ``trainer.callback_metrics``.

    Args:
        iteration: Its index, from 0.
        logged: Metrics by name, as numbers or scalar tensors.
        validated: Whether it ended with a validation; if not, validation metrics in ``logged`` are of an earlier one.
    """

    def number(name: str) -> float | None:
        return float(logged[name]) if name in logged else None

    seconds = {phase: float(logged[name]) for phase, name in _PHASES_S.items() if name in logged}
    return IterationMetrics(
        iteration=iteration,
        reward=number("critic/score/mean"),
        response_length=number("response_length/mean"),
        seconds=seconds,
        validation_reward=read_validation(logged) if validated else {},
        loss=number("train/loss"),
        validation_loss=number("val/loss") if validated else None,
        validation_accuracy=number("val/token_accuracy") if validated else None,
    )


def read_validation(logged: Mapping[str, Any]) -> dict[str, float]:
    """Mean validation reward by data source.

    Args:
        logged: Metrics by name, as numbers or scalar tensors.
    """
    return {
        name.removeprefix(_VALIDATION_PREFIX).removesuffix(_VALIDATION_SUFFIX): float(value)
        for name, value in sorted(logged.items())
        if name.startswith(_VALIDATION_PREFIX) and name.endswith(_VALIDATION_SUFFIX)
    }


def scored_version(module: LightningModule) -> int:
    """Version of the weights that a validation has scored: 0 before training, ``i + 1`` after iteration ``i``.

    Args:
        module: A PolicyGradientModule.
    """
    return int(cast(Any, module).policy_version)
