"""The worker that runs reward functions, one trajectory per call.

Position in the flow: agent worker (as each trajectory ends) or reward manager (a whole batch) -> **reward worker**.
It never raises for a fault of user code: that comes back as the result's ``error``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Mapping
from typing import Any

from lit_rl.cluster import WorkerHandle
from lit_rl.rewards.functions import MODELS_ARGUMENT, RewardFunction, importable_spec, load_reward_function
from lit_rl.rewards.processes import ScoreProcessError, ScoreProcesses
from lit_rl.rewards.result import RewardResult, ScoreRequest, ScoreTimeout, error_text, normalize_reward_return
from lit_rl.rewards.served_models import ServedRewardModel
from lit_rl.rewards.settings import RewardSettings
from lit_rl.rewards.threads import ScoreThreads
from lit_rl.tools.rate_limit import SharedRateLimit


class RewardLoopWorker:
    """Scores trajectories with the configured functions.

    Args:
        settings: Checked and loaded here, so that a wrong name fails at start.
        rate_limits: Limiter workers of the run, by position of the part.
        models: Reward models of the run, by name.
    """

    def __init__(
        self,
        settings: RewardSettings,
        rate_limits: Mapping[int, WorkerHandle] | None = None,
        models: Mapping[str, ServedRewardModel] | None = None,
    ) -> None:
        settings.check()
        self._models = dict(models or {})
        self._settings = settings
        self._rate_limits = {index: SharedRateLimit(handle) for index, handle in (rate_limits or {}).items()}
        self._parts = settings.resolved_parts()
        self._functions = [load_reward_function(part.function, part.kwargs) for part in self._parts]
        self._threads = ScoreThreads(settings.num_threads, settings.timeout_s)
        self._processes: ScoreProcesses | None = None
        if settings.isolation == "process":
            specs = [(importable_spec(part.function), part.kwargs) for part in self._parts]
            self._processes = ScoreProcesses(specs, settings.num_processes, settings.timeout_s)
        self._async_calls = asyncio.Semaphore(settings.max_concurrent_calls)

    async def score(self, request: ScoreRequest) -> RewardResult:
        """Score one trajectory; never raises for what a reward function does."""
        results = await asyncio.gather(*(self._score_part(i, request) for i in range(len(self._parts))))
        for result in results:
            if result.error is not None:
                return result
        total, parts, notes = 0.0, {}, {}
        for part, result in zip(self._parts, results, strict=True):
            assert result.score is not None
            total += part.weight * result.score
            prefix = f"{part.name}/" if part.name else ""
            parts.update({prefix + key: number for key, number in result.parts.items()})
            notes.update({prefix + key: text for key, text in result.notes.items()})
            if part.name:
                parts[part.name] = result.score
        overlong = self._settings.overlong
        if overlong is not None:
            penalty = overlong.penalty(request.num_response_tokens)
            total += penalty
            parts |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        return RewardResult(score=total, parts=parts, notes=notes)

    async def score_many(self, requests: list[ScoreRequest]) -> list[RewardResult]:
        """Score a batch concurrently; results in the order of the requests."""
        return list(await asyncio.gather(*(self.score(request) for request in requests)))

    async def close(self) -> None:
        """End threads and processes. Idempotent."""
        self._threads.close()
        if self._processes is not None:
            await self._processes.close()

    async def _score_part(self, index: int, request: ScoreRequest) -> RewardResult:
        function = self._functions[index]
        where = f"Reward function {function.name}, row {request.row_id}"
        try:
            limit = self._rate_limits.get(index)
            async with contextlib.nullcontext() if limit is None else limit.lease():
                value = await self._call(index, request)
        except ScoreTimeout as error:
            return RewardResult(score=None, error=f"{where}: {error}", is_timeout=True)
        except ScoreProcessError as error:
            return RewardResult(score=None, error=f"{where}: {error}")
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # user code may raise anything, SystemExit included
            return RewardResult(score=None, error=f"{where}:\n{error_text(error)}")
        return normalize_reward_return(value, function.name, request.row_id)

    async def _call(self, index: int, request: ScoreRequest) -> Any:
        function = self._functions[index]
        arguments = _arguments(function, request)
        if function.takes_models:
            arguments[MODELS_ARGUMENT] = self._models
        if self._processes is not None:
            return await self._processes.call(index, arguments)
        if function.is_async:
            async with self._async_calls:
                return await _within(function.call(**arguments), self._settings.timeout_s)
        value = await self._threads.call(functools.partial(function.call, **arguments))
        # A plain function may return an awaitable all the same (a lambda around an async one).
        return await _within(value, self._settings.timeout_s) if inspect.isawaitable(value) else value


def _arguments(function: RewardFunction, request: ScoreRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in function.arguments} | function.kwargs


async def _within(awaitable: Awaitable[Any], timeout_s: float) -> Any:
    task = asyncio.ensure_future(awaitable)
    try:
        # Not wait_for: it would wait on for a function that swallows its cancellation.
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise ScoreTimeout(timeout_s)
    if task.cancelled():
        raise RuntimeError("the function raised CancelledError")
    return task.result()
