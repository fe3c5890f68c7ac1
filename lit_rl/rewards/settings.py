"""Settings of the reward workers (YAML keys ``data.rewards.*``), checked when they are made. Nothing is scored here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lit_rl.rewards.functions import load_reward_function
from lit_rl.rewards.overlong import overlong_penalty
from lit_rl.serving.settings import ServingSettings
from lit_rl.tools.rate_limit import RateLimit

DEFAULT_FUNCTION = "lit_rl.rewards.score:compute_score"
"""Dispatches by ``data_source``; used where no function is configured."""


@dataclass(kw_only=True)
class RewardPart:
    """One of several rewards that are added up.

    Attributes:
        name: Metric name of this part's unweighted score; unique.
        function: As `RewardSettings.function`.
        weight: Factor of its score in the sum.
        kwargs: Further keyword arguments of the function.
        rate_limit: Limit of its calls in the whole run, whatever the number of workers.
    """

    name: str
    function: str | Callable[..., Any] = DEFAULT_FUNCTION
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    rate_limit: RateLimit | None = None


_CLASSIFIER_REPLICAS = {
    "vllm": "lit_rl.serving.vllm_classifier_replica.VLLMClassifierReplica",
    "transformers": "lit_rl.serving.classifier_replica.TransformersClassifierReplica",
}


@dataclass(kw_only=True)
class RewardModelSettings:
    """A reward model that the run serves beside the policy.

    Attributes:
        model_name: As the top-level ``model_name``: a folder, a hub id or a bundled model.
        kind: ``generative`` (a judge that writes) or ``classifier`` (a sequence classifier that returns numbers).
        max_model_len: Longest conversation it reads, a judge's answer included, in tokens.
        serving: Its replicas. Give ``threads_per_replica`` and ``first_core`` so that they do not share the cores of
            the policy's replicas, and ``kv_cache_gib``.
    """

    model_name: str
    kind: Literal["generative", "classifier"] = "generative"
    max_model_len: int = 2048
    serving: ServingSettings = field(default_factory=ServingSettings)

    def check(self, name: str) -> None:
        """Raise ``ValueError`` where an option is out of its range."""
        if not name.isidentifier():
            raise ValueError(f"data.rewards.models: {name!r} must be a name of letters, digits and underscores.")
        if self.kind not in ("generative", "classifier"):
            raise ValueError(f"data.rewards.models.{name}.kind={self.kind!r}: must be 'generative' or 'classifier'.")
        if self.max_model_len < 2:
            raise ValueError(f"data.rewards.models.{name}.max_model_len={self.max_model_len}: must be at least 2.")
        if self.serving.max_model_len is not None:
            raise ValueError(f"data.rewards.models.{name}: set max_model_len of the model, not of its serving.")

    def resolved_serving(self) -> ServingSettings:
        """The serving settings with the replica class of the model's kind."""
        if self.kind == "generative":
            return self.serving
        replica = self.serving.replica
        return replace(self.serving, replica=_CLASSIFIER_REPLICAS.get(replica, replica))


@dataclass(kw_only=True)
class OverlongShaping:
    """Soft punishment of long responses (DAPO, arXiv:2503.14476, eq. 13).

    Attributes:
        buffer_tokens: Length of the ramp before the limit, in [1, ``max_response_tokens``].
        max_response_tokens: Response length with the full penalty, in tokens.
        penalty_factor: Penalty at ``max_response_tokens``, in reward units.
    """

    buffer_tokens: int
    max_response_tokens: int
    penalty_factor: float = 1.0

    def check(self) -> None:
        """Raise ``ValueError`` where the ramp is longer than the response."""
        if not 1 <= self.buffer_tokens <= self.max_response_tokens:
            raise ValueError(
                f"data.rewards.overlong.buffer_tokens={self.buffer_tokens}: must lie in "
                f"[1, max_response_tokens={self.max_response_tokens}]."
            )
        if not math.isfinite(self.penalty_factor):
            raise ValueError(f"data.rewards.overlong.penalty_factor={self.penalty_factor}: must be a finite number.")

    def penalty(self, num_response_tokens: int) -> float:
        """Number to add to the score of a response of that many tokens; 0 or negative."""
        return overlong_penalty(
            num_response_tokens,
            max_response_tokens=self.max_response_tokens,
            buffer_tokens=self.buffer_tokens,
            penalty_factor=self.penalty_factor,
        )


@dataclass(kw_only=True)
class RewardSettings:
    """How trajectories are scored.

    Attributes:
        function: ``pkg.module:name``, ``pkg.module.name``, ``path/to/file.py:name`` (name ``compute_score`` if left
            out), or, from Python, a function. ``None`` chooses the scorer by the row's ``data_source``.
        kwargs: Further keyword arguments of the function; they win over the ones of the call.
        rate_limit: Limit of its calls in the whole run, whatever the number of workers. Waiting does not count as
            running.
        parts: Several weighted functions instead of one; each score is logged under its name.
        models: Reward models to serve, by name. Functions with a parameter ``models`` get them.
        overlong: Penalty for responses near the length limit; ``None`` is off.
        num_workers: Reward worker processes, at least 1; ``None`` takes ``min(4, CPU cores / 2)``.
        timeout_s: Longest run of one function call, in seconds. Running out of it is a failed score, not a score of 0.
        isolation: Where plain functions run: ``thread`` (fast, but one that never ends keeps its thread), or
            ``process`` (killed when its time is up; the function must be importable or in a file).
        num_threads: Threads per worker.
        num_processes: Processes per worker with ``isolation: process``.
        max_concurrent_calls: Calls of ``async def`` functions that one worker runs at once.
        start_timeout_s: Longest start of the workers, in seconds.
    """

    function: str | Callable[..., Any] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    rate_limit: RateLimit | None = None
    parts: list[RewardPart] = field(default_factory=list)
    models: dict[str, RewardModelSettings] = field(default_factory=dict)
    overlong: OverlongShaping | None = None
    num_workers: int | None = None
    timeout_s: float = 60.0
    isolation: Literal["thread", "process"] = "thread"
    num_threads: int = 8
    num_processes: int = 2
    max_concurrent_calls: int = 64
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        """Check what can be checked before anything starts, the functions included."""
        self.check()
        for part in self.resolved_parts():
            if part.function != DEFAULT_FUNCTION:
                load_reward_function(part.function, part.kwargs)

    def resolved_num_workers(self) -> int:
        """Number of workers to start."""
        return self.num_workers if self.num_workers is not None else max(1, min(4, (os.cpu_count() or 1) // 2))

    def resolved_parts(self) -> list[RewardPart]:
        """The configured parts, or the single function as one part without a name."""
        if self.parts:
            return self.parts
        function = DEFAULT_FUNCTION if self.function is None else self.function
        return [RewardPart(name="", function=function, kwargs=self.kwargs, rate_limit=self.rate_limit)]

    def dispatches_by_data_source(self) -> bool:
        """Whether any scorer is chosen by the row's ``data_source``."""
        own = {DEFAULT_FUNCTION, "lit_rl.rewards.score.compute_score", "lit_rl.rewards.compute_score"}
        return any(part.function in own for part in self.resolved_parts())

    def check(self) -> None:
        """Raise ``ValueError`` where options are out of range or contradict each other."""
        if self.parts and (self.function is not None or self.kwargs or self.rate_limit is not None):
            raise ValueError(
                "data.rewards: give function, kwargs and rate_limit, or parts (which have their own), not both."
            )
        names = [part.name for part in self.parts]
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(f"data.rewards.parts: names must be unique and not empty, got {names}.")
        for name, model in self.models.items():
            model.check(name)
        if self.models and self.isolation == "process":
            raise ValueError(
                "data.rewards.models: their functions run on the workers' event loops. Set isolation to 'thread'."
            )
        for part in self.parts:
            if not math.isfinite(part.weight):
                raise ValueError(
                    f"data.rewards.parts: the weight of {part.name}, {part.weight}, must be a finite number."
                )
        if self.isolation not in ("thread", "process"):
            raise ValueError(f"data.rewards.isolation={self.isolation!r}: must be 'thread' or 'process'.")
        for name in ("num_workers", "num_threads", "num_processes", "max_concurrent_calls"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.rewards.{name}={value}: must be at least 1.")
        for name in ("timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:  # NaN is refused too: nothing would ever time out
                raise ValueError(f"data.rewards.{name}={getattr(self, name)}: must be a positive number of seconds.")
        if self.overlong is not None:
            self.overlong.check()
