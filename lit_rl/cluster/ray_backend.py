"""Workers that are Ray actors: how one is started, called, and ended.

The driver's side of ``ray_host.py``. Imported only when the Ray backend is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import psutil
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RaySystemError,
    TaskCancelledError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lit_rl.cluster.handle import WorkerDied, timeout_error
from lit_rl.cluster.ray_host import Failure, ProcessIdentity, WorkerHost, end_processes

GONE = (RayActorError, WorkerCrashedError, ObjectLostError, RaySystemError, TaskCancelledError)


class RayWorkerHandle:
    """A worker in an actor of its own. Picklable; the actor lives as long as the driver, or until `stop`."""

    def __init__(
        self,
        name: str,
        actor: Any,
        identity: Any = None,
        started: Any = None,
        restarts: bool = False,
        blueprint: Any = None,
    ) -> None:
        self._name = name
        self._actor = actor
        self._restarts = restarts
        # Held here: a dead actor holds nothing, and the object would be gone when Ray starts the next process.
        self._blueprint = blueprint
        self._identity = identity
        self._started = started

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self._name

    async def ready(self, timeout_s: float) -> None:
        """Wait until the worker is constructed; raise what its constructor raised."""
        if self._started is not None:
            self._check(await self._bounded(self._started, "__init__", timeout_s), "__init__")

    async def call(self, method: str, /, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """See `WorkerHandle.call`."""
        ref = self._actor.call.remote(method, *args, **kwargs)
        return self._check(await self._bounded(ref, method, timeout_s), method)

    async def stream(self, method: str, /, *args: Any, timeout_s: float, **kwargs: Any) -> AsyncIterator[Any]:
        """See `WorkerHandle.stream`."""
        refs = self._actor.stream.options(num_returns="streaming").remote(method, *args, **kwargs)
        is_finished = False
        try:
            while True:
                try:
                    item = await self._bounded(_next_item(refs), method, timeout_s)
                except StopAsyncIteration:
                    is_finished = True
                    return
                yield self._check(item, method)
        finally:
            if not is_finished:
                _cancel(refs)

    async def stop(self, timeout_s: float) -> None:
        """See `WorkerHandle.stop`."""
        process, children = await self._find_processes()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(_value(self._actor.shutdown.remote()), timeout_s)
        with contextlib.suppress(Exception):
            ray.kill(self._actor, no_restart=True)
        with contextlib.suppress(Exception):
            # Fails once the cluster has noted the death; until then the actor's name is still taken.
            await asyncio.wait_for(_value(self._actor.identity.remote()), 5.0)
        await asyncio.to_thread(end_processes, children, 0.5)
        if process is not None:
            await asyncio.to_thread(psutil.wait_procs, [process], 5.0)

    async def _find_processes(self) -> tuple[psutil.Process | None, list[psutil.Process]]:
        """Return the worker's process and those below it, as far as they are on this machine."""
        if self._identity is None:
            return None, []
        try:
            # One that has restarted is another process than it was.
            current = self._actor.identity.remote() if self._restarts else self._identity
            identity: ProcessIdentity = await asyncio.wait_for(_value(current), 2.0)
            process = identity.find()
            return process, process.children(recursive=True) if process else []
        except Exception:  # not up yet, or gone already: then there is nothing to remember
            return None, []

    async def _bounded(self, awaitable: Any, method: str, timeout_s: float) -> Any:
        """Await an answer, bounded in time, with the errors every backend raises."""
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await awaitable
        except TimeoutError:
            _cancel(awaitable)
            raise timeout_error(self._name, method, timeout_s) from None
        except asyncio.CancelledError:
            _cancel(awaitable)
            raise
        except GONE as error:
            raise WorkerDied(self._name, _first_line(error), self._restarts) from error

    def _check(self, outcome: Any, method: str) -> Any:
        if isinstance(outcome, Failure):
            self._raise(outcome, method)
        return outcome

    def _raise(self, failure: Failure, method: str) -> NoReturn:
        error = failure.restore()
        error.add_note(f"Raised by {method}() in worker {self._name}:\n{failure.trace}")
        raise error

    def __reduce__(self) -> tuple[Any, ...]:
        # The references stay here: a copy of them would pin their objects for the life of the other process.
        return RayWorkerHandle, (self._name, self._actor, None, None, self._restarts)


def start_worker(
    name: str,
    namespace: str,
    worker_cls: type,
    kwargs: dict[str, Any],
    *,
    num_cpus: float,
    num_gpus: float,
    env: dict[str, str | None],
    max_concurrency: int,
    node_id: str | None = None,
    restarts: bool = False,
) -> RayWorkerHandle:
    """Start one worker and return at once; `RayWorkerHandle.ready` waits for it.

    Args as in `WorkerGroup.create`; ``node_id`` is the node to prefer, any other serves too.
    """
    settings = {variable: value for variable, value in env.items() if value is not None}
    blueprint = ray.put((worker_cls, kwargs)) if restarts else None
    host: Any = ray.remote(WorkerHost)
    actor = host.options(
        name=name,
        namespace=namespace,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_concurrency=max_concurrency,
        runtime_env={"env_vars": settings} if settings else None,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True) if node_id else None,
        # A byte: Ray places an actor that asks for nothing on any node, whatever node it prefers (2.60).
        memory=1 if node_id else None,
        max_restarts=-1 if restarts else 0,
        enable_task_events=False,  # thousands of short calls per second
    ).remote(list(sys.path), env, [blueprint] if restarts else None)
    identity = actor.identity.remote()
    if restarts:
        started = actor.start_from_blueprint.remote()
        return RayWorkerHandle(name, actor, identity, started, restarts=True, blueprint=blueprint)
    # A second step, so that class and arguments are unpickled after the environment is set.
    return RayWorkerHandle(name, actor, identity, actor.start.remote(worker_cls, kwargs))


def cpu_nodes() -> list[str]:
    """Ids of the living nodes that have cores, this process's own first, the others in the order of their addresses."""
    own = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    nodes.sort(key=lambda node: (node["NodeID"] != own, node["NodeManagerAddress"], node["NodeID"]))
    return [node["NodeID"] for node in nodes]


def find_actor(name: str, namespace: str) -> RayWorkerHandle:
    """Return a handle of a worker that another process of this run has started.

    Raises:
        ValueError: If there is no worker of that name.
    """
    return RayWorkerHandle(name, ray.get_actor(name, namespace=namespace))


def put(value: Any) -> Any:
    """Return a reference to a copy of a value in the object store; as an argument of a call it arrives as the value."""
    return ray.put(value)


async def _value(ref: Any) -> Any:
    return await ref


async def _next_item(refs: Any) -> Any:
    return await (await anext(refs))


def _cancel(running: Any) -> None:
    with contextlib.suppress(Exception):  # a best effort: the worker may be gone
        if isinstance(running, ray.ObjectRef | ray.ObjectRefGenerator):
            ray.cancel(running, recursive=False)


def _first_line(error: Exception) -> str:
    if isinstance(error, GetTimeoutError):
        return "it did not answer"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
