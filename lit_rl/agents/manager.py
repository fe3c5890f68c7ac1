"""Spreads trajectories over the agent-loop workers and brings them back in order.

Position in the flow: collector -> **manager** -> workers. A worker that dies loses nothing: its unfinished trajectories
go to the others. A trajectory that failed through infrastructure is started again; one that failed through user code is
returned marked (design D12).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lit_rl.agents.agent_loop import GenerationClient
from lit_rl.agents.policy_text import PolicyText
from lit_rl.agents.run_tools import load_run_tools
from lit_rl.agents.settings import AgentSettings, TrajectoryRequest
from lit_rl.agents.worker import INFRASTRUCTURE, AgentLoopWorker
from lit_rl.cluster import RESTART_PAUSES_S, Runtime, WorkerDied, WorkerGroup, WorkerHandle
from lit_rl.tools.rate_limit import create_rate_limiters
from lit_rl.types import SamplingParams, Trajectory

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0


class RolloutFailed(RuntimeError):
    """Every trajectory of a rollout failed; the message holds the first one's error."""


class AgentLoopManager:
    """The agent-loop workers of a run. Its coroutines run on the runtime's event loop.

    Args:
        runtime: Where the workers live.
        settings: Limits and loop classes.
        client: Sends generation requests; copied into every worker.
        policy_text: Local model folder with the tokenizer, or what is otherwise loaded from it.
        reward_handles: Reward workers; without any, trajectories come back unscored.
        tools: The run's tools where they are loaded already, for their rate limits; default: loaded in `start`. Workers
            load their own.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        runtime: Runtime,
        settings: AgentSettings,
        client: GenerationClient,
        policy_text: str | PolicyText,
        reward_handles: Sequence[WorkerHandle] = (),
        tools: Mapping[str, Any] | None = None,
    ) -> None:
        settings.check()
        self._runtime = runtime
        self._settings = settings = settings.with_absolute_paths()
        self._worker_kwargs: dict[str, Any] = {
            "settings": settings,
            "client": client,
            "policy_text": policy_text,
            "reward_handles": list(reward_handles),
        }
        self._tools = tools
        self._limiters: dict[str, WorkerGroup] | None = None
        self._groups: list[WorkerGroup] = []
        self._workers: list[WorkerHandle] = []
        self._start_lock = asyncio.Lock()  # validation may ask while the background collects

    async def start(self) -> None:
        """Start the workers and wait for them. Idempotent; workers that died since are replaced.

        Raises:
            WorkerDied: If no worker comes up, in several attempts.
            Exception: What a worker's constructor raised, or that it took too long.
        """
        async with self._start_lock:
            for pause_s in (*RESTART_PAUSES_S, None):
                missing = self._settings.resolved_num_workers() - len(self._workers)
                if missing <= 0:
                    return
                await self._start_limiters()
                error = await self._start_workers(missing)
                if error is None or self._workers:
                    return  # fewer than wished for roll out more slowly; the next start tries again
                if pause_s is None or not isinstance(error, WorkerDied):
                    raise error
                await asyncio.sleep(pause_s)  # a node that is lost counts as alive for a while

    async def _start_workers(self, num_workers: int) -> BaseException | None:
        """Start so many workers and keep those that come up; returns the first failure."""
        group = WorkerGroup.create(
            self._runtime,
            AgentLoopWorker,
            num_workers,
            name=f"agent_loop_worker_{uuid.uuid4().hex[:8]}",
            kwargs=self._worker_kwargs,
            spread=True,
            env={"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._groups.append(group)
        ready = (worker.ready(self._settings.start_timeout_s) for worker in group.workers)
        outcomes = await asyncio.gather(*ready, return_exceptions=True)
        failed = {worker: outcome for worker, outcome in zip(group.workers, outcomes, strict=True) if outcome}
        self._workers += [worker for worker in group.workers if worker not in failed]
        for worker, error in failed.items():
            log.warning("Agent-loop worker %s did not start: %s", worker.name, error)
        await asyncio.gather(*(worker.stop(0.5) for worker in failed))
        return next(iter(failed.values()), None)

    async def stop(self) -> None:
        """Stop the workers, then the rate limiters they may still ask. Idempotent."""
        groups, self._groups, self._workers = self._groups, [], []
        limiters, self._limiters = self._limiters or {}, None
        await asyncio.gather(*(group.stop(_STOP_TIMEOUT_S) for group in groups))
        await asyncio.gather(*(group.stop(_STOP_TIMEOUT_S) for group in limiters.values()))

    async def _start_limiters(self) -> None:
        if self._limiters is not None:
            return
        # In a thread: loading runs user code and may wait for MCP servers.
        tools = await asyncio.to_thread(load_run_tools, self._settings) if self._tools is None else self._tools
        self._limiters = create_rate_limiters(self._runtime, tools.values())
        await asyncio.gather(*(group.ready(self._settings.start_timeout_s) for group in self._limiters.values()))
        self._worker_kwargs["rate_limits"] = {name: group.workers[0] for name, group in self._limiters.items()}

    async def generate(
        self,
        requests: list[TrajectoryRequest],
        sampling: SamplingParams,
        *,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Roll out all requests.

        Args:
            requests: Any number, fewer than workers or none included.
            sampling: For all of them; each request's own seed is put in.
            on_finished: Called on the event loop with each trajectory as it ends (for a progress display).

        Returns:
            One trajectory per request, in order; failed ones have ``error`` set.

        Raises:
            RolloutFailed: If every trajectory failed.
        """
        if not requests:
            return []
        await self.start()
        rollout = _Rollout(self, requests, sampling, on_finished)
        trajectories = await rollout.run()
        failed = [trajectory for trajectory in trajectories if trajectory.error is not None]
        if len(failed) == len(trajectories):
            raise RolloutFailed(f"All {len(failed)} trajectories failed. The first one:\n{failed[0].error}")
        if failed:
            log.warning(
                "%d of %d trajectories failed and are left out. The first one:\n%s",
                len(failed),
                len(trajectories),
                failed[0].error,
            )
        return trajectories

    async def workers_besides(self, avoided: WorkerHandle | None) -> list[WorkerHandle]:
        """Living workers, without ``avoided`` where there are others; new ones where none is left."""
        if not self._workers:
            await self.start()
        return [worker for worker in self._workers if worker is not avoided] or list(self._workers)

    async def drop_worker(self, worker: WorkerHandle, error: Exception) -> None:
        """Forget a worker that died or hangs, and make sure that its process ends."""
        log.warning("Agent-loop worker %s is given up, its trajectories go to others: %s", worker.name, error)
        if worker in self._workers:
            self._workers.remove(worker)
        await worker.stop(0.5)

    @property
    def settings(self) -> AgentSettings:
        """Settings of the workers."""
        return self._settings


class _Rollout:
    """One call of `AgentLoopManager.generate`."""

    def __init__(
        self,
        manager: AgentLoopManager,
        requests: list[TrajectoryRequest],
        sampling: SamplingParams,
        on_finished: Callable[[Trajectory], None] | None,
    ) -> None:
        self._manager = manager
        self._requests = requests
        self._sampling = sampling
        self._on_finished = on_finished
        self._results: list[Trajectory | None] = [None] * len(requests)

    async def run(self) -> list[Trajectory]:
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._submit(tasks, list(range(len(self._requests))), attempt=0, avoided=None)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # the other chunks were cancelled because of it
        return [trajectory for trajectory in self._results if trajectory is not None]

    async def _submit(
        self, tasks: asyncio.TaskGroup, indices: list[int], *, attempt: int, avoided: WorkerHandle | None
    ) -> None:
        workers = await self._manager.workers_besides(avoided)
        for worker, chunk in zip(workers, split_evenly(len(indices), len(workers)), strict=False):
            tasks.create_task(self._run_chunk(tasks, worker, [indices[i] for i in chunk], attempt))

    async def _run_chunk(
        self, tasks: asyncio.TaskGroup, worker: WorkerHandle, indices: list[int], attempt: int
    ) -> None:
        settings = self._manager.settings
        can_retry = attempt < settings.max_resubmissions
        requests = [self._requests[i] for i in indices]
        unfinished = set(indices)
        stream: Any = worker.stream("run", requests, self._sampling, timeout_s=settings.worker_timeout_s)
        try:
            async with contextlib.aclosing(stream):  # so that cancelling ends the worker's tasks at once
                async for batch in stream:
                    to_retry = []
                    for position, trajectory in batch:
                        unfinished.discard(indices[position])
                        if can_retry and (trajectory.error or "").startswith(INFRASTRUCTURE):
                            to_retry.append(indices[position])
                        else:
                            self._finish(indices[position], trajectory, attempt)
                    if to_retry:
                        await self._submit(tasks, to_retry, attempt=attempt + 1, avoided=worker)
        except (WorkerDied, TimeoutError) as error:
            await self._manager.drop_worker(worker, error)
            if not unfinished:
                return
            if can_retry:
                await self._submit(tasks, sorted(unfinished), attempt=attempt + 1, avoided=worker)
                return
            for index in sorted(unfinished):
                self._finish(index, _lost(self._requests[index], error), attempt)

    def _finish(self, index: int, trajectory: Trajectory, attempt: int) -> None:
        trajectory.metrics["num_resubmitted"] = float(attempt)
        self._results[index] = trajectory
        if self._on_finished is not None:
            self._on_finished(trajectory)


def split_evenly(num_items: int, num_parts: int) -> list[range]:
    """Contiguous ranges over ``num_items``, at most ``num_parts``, none empty, sizes differing by at most one."""
    size, larger = divmod(num_items, num_parts)
    starts = [part * size + min(part, larger) for part in range(num_parts + 1)]
    return [range(start, end) for start, end in zip(starts, starts[1:], strict=False) if end > start]


def _lost(request: TrajectoryRequest, error: Exception) -> Trajectory:
    return Trajectory(
        row_id=request.prompt.row_id,
        group_id=request.group_id,
        sample_index=request.sample_index,
        data_source=request.prompt.data_source,
        prompt_ids=list(request.prompt.prompt_ids or []),
        response_ids=[],
        loss_mask=[],
        rollout_logprobs=[],
        policy_versions=[],
        seed=request.seed,
        error=f"{INFRASTRUCTURE}row {request.prompt.row_id}: {error}",
    )
