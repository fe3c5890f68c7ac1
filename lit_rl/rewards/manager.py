"""Starts the reward workers, hands out their handles, and scores batches.

Position in the flow: the trainer process owns one manager. Agent workers get `handles` and score each trajectory as
it ends; `score_batch` is for trajectories that were finished without a reward.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid

from lit_rl.cluster import Runtime, WorkerGroup, WorkerHandle
from lit_rl.rewards.client import RewardClient
from lit_rl.rewards.functions import absolute_spec, load_reward_function
from lit_rl.rewards.result import RewardResult, ScoreRequest
from lit_rl.rewards.served_models import RewardModelServers, check_models_are_used
from lit_rl.rewards.settings import RewardSettings
from lit_rl.rewards.worker import RewardLoopWorker
from lit_rl.tools.rate_limit import RateLimiter
from lit_rl.types import Prompt, Trajectory

_BATCH_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 10.0


class RewardLoopManager:
    """The reward workers of a run.

    Args:
        runtime: Where the workers live.
        settings: Functions and limits; checked here, before anything starts.
        gpu: Whether replicas of reward models take GPUs.
        verbose: Show the logs of their engines.

    Raises:
        ValueError: If an option is out of range, or a function cannot be found or called.
    """

    def __init__(self, runtime: Runtime, settings: RewardSettings, *, gpu: bool = False, verbose: bool = False) -> None:
        settings.check()
        self._runtime = runtime
        self.settings = _with_absolute_paths(settings)
        functions = [load_reward_function(part.function, part.kwargs) for part in self.settings.resolved_parts()]
        asked = [(function.name, function.kwargs) for function in functions if function.takes_models]
        check_models_are_used(settings.models, asked)
        self._servers = RewardModelServers(runtime, settings.models, gpu=gpu, verbose=verbose)
        self._group: WorkerGroup | None = None
        self._limiters: list[WorkerGroup] = []
        self._client: RewardClient | None = None

    @property
    def handles(self) -> list[WorkerHandle]:
        """The workers; empty before `start` and after `stop`."""
        return [] if self._group is None else list(self._group.workers)

    @property
    def start_timeout_s(self) -> float:
        """Longest `start`, in seconds: the workers, and one reward model after another."""
        models = self.settings.models.values()
        return self.settings.start_timeout_s + sum(model.serving.start_timeout_s + 60.0 for model in models)

    async def start(self) -> None:
        """Start reward models and workers and wait for them. Idempotent."""
        if self._group is not None:
            return
        models = await self._servers.start()
        suffix = uuid.uuid4().hex[:8]  # two managers may live in one runtime
        limits = {
            index: part.rate_limit for index, part in enumerate(self.settings.resolved_parts()) if part.rate_limit
        }
        limiters = {
            index: WorkerGroup.create(
                self._runtime,
                RateLimiter,
                1,
                name=f"reward_rate_limit_{index}_{suffix}",
                kwargs={"limit": limit},
                restarts=True,
            )
            for index, limit in limits.items()
        }
        self._limiters = list(limiters.values())
        self._group = WorkerGroup.create(
            self._runtime,
            RewardLoopWorker,
            self.settings.resolved_num_workers(),
            spread=True,
            restarts=True,
            name=f"reward_loop_worker_{suffix}",
            kwargs={
                "settings": self.settings,
                "rate_limits": {index: group.workers[0] for index, group in limiters.items()},
                "models": models,
            },
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        await self._group.ready(self.settings.start_timeout_s)
        self._client = RewardClient(self._group.workers, _BATCH_TIMEOUT_S)

    async def score_batch(self, prompts: list[Prompt], trajectories: list[Trajectory]) -> None:
        """Score finished trajectories and fill their ``reward``, ``reward_parts`` and, where scoring failed, ``error``.

        Args:
            prompts: Row of each trajectory.
            trajectories: With ``text`` set. Those that failed or have a reward already are left alone.

        Raises:
            RuntimeError: Before `start`.
            WorkerDied: If no reward worker is left.
        """
        if self._client is None:
            raise RuntimeError("RewardLoopManager.score_batch was called before start().")
        score = self._client.score
        chosen = [
            (prompt, trajectory)
            for prompt, trajectory in zip(prompts, trajectories, strict=True)
            if trajectory.error is None and trajectory.reward is None
        ]
        requests = [ScoreRequest.from_trajectory(prompt, trajectory) for prompt, trajectory in chosen]
        results = await asyncio.gather(*(score(request) for request in requests))
        for (_, trajectory), result in zip(chosen, results, strict=True):
            apply_result(trajectory, result)

    async def stop(self) -> None:
        """Stop the workers, then what they ask. Idempotent."""
        group, self._group, self._client = self._group, None, None
        limiters, self._limiters = self._limiters, []
        if group is not None:
            await group.stop(_STOP_TIMEOUT_S)
        await asyncio.gather(self._servers.stop(), *(limiter.stop(_STOP_TIMEOUT_S) for limiter in limiters))


def apply_result(trajectory: Trajectory, result: RewardResult) -> None:
    """Write a result into its trajectory; numbers the agent loop has put there stay."""
    trajectory.reward = result.score
    trajectory.reward_parts.update(result.parts)
    trajectory.reward_notes.update(result.notes)
    if result.error is not None:
        trajectory.error = result.error
        trajectory.metrics["reward_timeout" if result.is_timeout else "reward_error"] = 1.0


def _with_absolute_paths(settings: RewardSettings) -> RewardSettings:
    parts = [dataclasses.replace(part, function=absolute_spec(part.function)) for part in settings.parts]
    function = None if settings.function is None else absolute_spec(settings.function)
    return dataclasses.replace(settings, function=function, parts=parts)
