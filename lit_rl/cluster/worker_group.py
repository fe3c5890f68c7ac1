"""Many workers addressed as one: how a group is created, waited for and stopped.

The two backends give the same handles (design D8). What a call on the whole group does with its arguments is in
``dispatch.py``; nothing here knows what a worker computes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

from lit_rl.cluster.dispatch import DispatchError, MeshPosition, find_rules
from lit_rl.cluster.group_method import GroupMethod
from lit_rl.cluster.handle import WorkerHandle
from lit_rl.cluster.inline_backend import InlineWorkerHandle
from lit_rl.cluster.runtime import Runtime

Environment = dict[str, str | None]
"""Environment variables of a worker; ``None`` removes an inherited one."""


class WorkerGroup:
    """Workers of one class, in rank order. Use `create`.

    Methods marked with `dispatch` on the worker's class appear on the group under the same name.
    """

    def __init__(self, name: str, workers: Sequence[WorkerHandle], worker_cls: type, runtime: Runtime) -> None:
        self.name = name
        self.workers = list(workers)
        self._runtime = runtime
        self._mesh_positions: dict[str, list[MeshPosition]] = {}
        for method, rule in find_rules(worker_cls).items():
            if hasattr(self, method):
                raise ValueError(
                    f"WorkerGroup {name}: {worker_cls.__name__}.{method} is marked with @dispatch, but groups have "
                    "an attribute of that name; rename the method."
                )
            bound = GroupMethod(method, rule, self.workers, runtime.loop, self._get_mesh_positions, self._share)
            setattr(self, method, bound)

    @classmethod
    def create(
        cls,
        runtime: Runtime,
        worker_cls: type,
        num_workers: int,
        *,
        name: str,
        kwargs: dict[str, Any] | None = None,
        per_rank_kwargs: Sequence[dict[str, Any]] | None = None,
        num_cpus: float = 0.0,
        num_gpus: float = 0.0,
        env: Environment | Sequence[Environment] | None = None,
        max_concurrency: int = 1000,
        spread: bool = False,
        restarts: bool = False,
    ) -> WorkerGroup:
        """Start ``num_workers`` workers and return at once; `ready` waits for them.

        Args:
            runtime: Where they live; started if it is not yet.
            worker_cls: Class of the workers. Its instances are constructed on the worker's event loop.
            num_workers: At least 1.
            name: Worker ``r`` is called ``name-r``; unique within the runtime.
            kwargs: Constructor arguments of every worker.
            per_rank_kwargs: Further ones, one dictionary per rank; they win over ``kwargs``.
            num_cpus: Cores reserved per worker; 0 reserves none.
            num_gpus: GPUs reserved per worker; fractions share one.
            env: Environment of the workers, one for all or one per rank, in place before their class is imported. The
                rank variables of a training launcher are removed unless given here. Without effect inline.
            max_concurrency: Most calls a worker runs at once.
            spread: Place workers round-robin over the nodes with cores, this one first. A wish: where a node is gone, a
                worker starts elsewhere. Otherwise, and inline, Ray chooses.
            restarts: Start a new process, with a newly constructed worker, in the place of one that died. Calls that it
                had raise `WorkerDied` with ``is_restarting``. For workers without a state of their own.
        """
        if num_workers < 1:
            raise ValueError(f"WorkerGroup {name}: num_workers={num_workers} must be at least 1.")
        runtime.start()
        rank_kwargs = _per_rank(per_rank_kwargs, num_workers, "per_rank_kwargs", name)
        rank_env = _per_rank([env] * num_workers if isinstance(env, dict) else env, num_workers, "env", name)
        handles: list[WorkerHandle] = []
        nodes = _nodes(runtime) if spread else []
        for rank in range(num_workers):
            worker_kwargs = {**(kwargs or {}), **rank_kwargs[rank]}
            if runtime.backend == "inline":
                build = functools.partial(worker_cls, **worker_kwargs)
                handles.append(InlineWorkerHandle(f"{name}-{rank}", build, runtime.loop, max_concurrency))
                continue
            from lit_rl.cluster.ray_backend import start_worker

            handles.append(
                start_worker(
                    f"{name}-{rank}",
                    runtime.namespace,
                    worker_cls,
                    worker_kwargs,
                    num_cpus=num_cpus,
                    num_gpus=num_gpus,
                    env=dict(rank_env[rank]),
                    max_concurrency=max_concurrency,
                    node_id=nodes[rank % len(nodes)] if nodes else None,
                    restarts=restarts,
                )
            )
        group = cls(name, handles, worker_cls, runtime)
        runtime.register(group)
        return group

    async def ready(self, timeout_s: float) -> None:
        """Wait until every worker is constructed.

        Raises:
            TimeoutError: If one is not after ``timeout_s`` seconds; names it.
            Exception: What a constructor raised, in its own type.
        """
        await asyncio.gather(*(worker.ready(timeout_s) for worker in self.workers))

    async def stop(self, timeout_s: float) -> None:
        """Close and end every worker with its child processes; ``timeout_s`` seconds for closing. Idempotent."""
        await asyncio.gather(*(worker.stop(timeout_s) for worker in self.workers))

    def __len__(self) -> int:
        return len(self.workers)

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not there; tells type checkers that marked methods may be.
        raise AttributeError(f"WorkerGroup {self.__dict__.get('name')}: no method {name!r} is marked with @dispatch.")

    async def _get_mesh_positions(self, mesh: str) -> list[MeshPosition]:
        """Ask every worker once where it is in a mesh."""
        if mesh not in self._mesh_positions:
            asked = (worker.call("get_mesh_position", mesh, timeout_s=60.0) for worker in self.workers)
            positions = list(await asyncio.gather(*asked))
            _check_mesh(self.name, mesh, positions)
            self._mesh_positions[mesh] = positions
        return self._mesh_positions[mesh]

    async def _share(self, value: Any) -> Any:
        """Return what stands for a value that several workers get: with Ray, one copy in the object store."""
        if self._runtime.backend == "inline":
            return value
        from lit_rl.cluster.ray_backend import put

        return await asyncio.to_thread(put, value)


def find_worker(runtime: Runtime, name: str) -> WorkerHandle:
    """Return a handle of the worker called ``name`` that another process of this run has started (Ray only).

    Raises:
        ValueError: If there is no such worker, or the backend is inline.
    """
    if runtime.backend == "inline":
        raise ValueError(
            f"find_worker({name!r}): inline workers have no name outside their process; pass the handle on."
        )
    from lit_rl.cluster.ray_backend import find_actor

    runtime.start()
    return find_actor(name, runtime.namespace)


def _check_mesh(group: str, mesh: str, positions: Sequence[MeshPosition]) -> None:
    """Refuse a mesh in which a share would reach nobody, or its result come back twice or not at all."""
    for dp_rank in range(1 + max(position.dp_rank for position in positions)):
        ranks = [rank for rank, position in enumerate(positions) if position.dp_rank == dp_rank]
        collecting = [rank for rank in ranks if positions[rank].is_collecting]
        if len(collecting) != 1:
            raise DispatchError(
                f"WorkerGroup {group}: data-parallel rank {dp_rank} of mesh {mesh!r} has the workers {ranks}, of which "
                f"{collecting} collect. Register every rank from 0 on, each with exactly one collecting worker."
            )


def _nodes(runtime: Runtime) -> list[str]:
    if runtime.backend == "inline":
        return []
    from lit_rl.cluster.ray_backend import cpu_nodes

    return cpu_nodes()


def _per_rank(given: Sequence[Any] | None, num_workers: int, option: str, name: str) -> list[dict[str, Any]]:
    if given is None:
        return [{} for _ in range(num_workers)]
    if len(given) != num_workers:
        raise ValueError(
            f"WorkerGroup {name}: {option} has {len(given)} entries for {num_workers} workers; give one per rank."
        )
    return [dict(entry or {}) for entry in given]
