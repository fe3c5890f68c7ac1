"""A marked method as it appears on a worker group: plans the calls, makes them, and joins the results.

Position in the flow: caller -> **group method** -> `plan_calls` -> worker handles -> `join_results` -> caller.
When one rank fails the others are not left waiting: their calls are cancelled and one error lists every rank.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lit_rl.cluster.dispatch import (
    Call,
    DispatchRule,
    Mesh,
    MeshPosition,
    is_joined,
    join_results,
    plan_calls,
)
from lit_rl.cluster.handle import WorkerHandle
from lit_rl.cluster.runtime import EventLoopThread

# After the first failure the others get this long to fail by themselves, so that the error shows the cause and not only
# the rank that noticed first.
_FAILURE_GRACE_S = 1.0


class WorkerGroupError(RuntimeError):
    """A group call failed on at least one rank.

    Attributes:
        failures: Exception of each failed rank. Ranks whose call was cancelled because of them are in ``cancelled``.
        cancelled: Ranks that were still busy.
    """

    def __init__(
        self, method: str, names: Sequence[str], failures: dict[int, BaseException], cancelled: list[int]
    ) -> None:
        self.failures = failures
        self.cancelled = cancelled
        lines = [f"{method}() failed on {len(failures)} of {len(names)} workers."]
        for rank, error in sorted(failures.items()):
            lines.append(f"Rank {rank} ({names[rank]}):")
            lines.append("".join(traceback.format_exception(error)).rstrip())
        if cancelled:
            lines.append(f"Cancelled on ranks {cancelled}, which had not finished.")
        super().__init__("\n".join(lines))


class GroupMethod:
    """One marked method of a worker group, callable from ordinary threads; use `run` from asynchronous code."""

    def __init__(
        self,
        name: str,
        rule: DispatchRule,
        workers: Sequence[WorkerHandle],
        loop: EventLoopThread,
        positions: Callable[[str], Awaitable[list[MeshPosition]]],
        share: Callable[[Any], Awaitable[Any]],
    ) -> None:
        self.__name__ = name
        self._rule = rule
        self._workers = workers
        self._loop = loop
        self._positions = positions
        self._share = share

    def options(self, *, timeout_s: float | None = None, blocking: bool | None = None) -> GroupMethod:
        """Return the same method with another timeout (seconds), or blocking where it was not, and the reverse."""
        given: dict[str, Any] = {"timeout_s": timeout_s, "blocking": blocking}
        rule = dataclasses.replace(self._rule, **{key: value for key, value in given.items() if value is not None})
        return GroupMethod(self.__name__, rule, self._workers, self._loop, self._positions, self._share)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the workers. Arguments that are futures of earlier calls are waited for first.

        Returns:
            What the mode says, see `Dispatch`; or futures of it: one where results are joined or rank 0 runs alone,
            else a list with one per rank.

        Raises:
            WorkerGroupError: At least one rank failed or took too long; lists all that did.
            DispatchError: Arguments or results do not fit the mode.
        """
        if self._rule.blocking:
            what = f"{self.__name__}() on {len(self._workers)} workers"
            # The workers' own timeouts come first and say more.
            return self._loop.run(self.run(*args, **kwargs), timeout_s=self._rule.timeout_s + 30.0, what=what)
        if is_joined(self._rule):
            return self._loop.submit(self.run(*args, **kwargs))
        futures: list[concurrent.futures.Future[Any]] = [concurrent.futures.Future() for _ in self._workers]
        self._loop.submit(self._fill(futures, args, kwargs))
        return futures

    async def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the workers and return the joined results."""
        positions, calls = await self._plan(args, kwargs)
        tasks = self._start(calls)
        await self._finish(tasks)
        results = [task.result() if task else None for task in tasks]
        return join_results(self.__name__, self._rule, positions, results, calls)

    async def _fill(
        self, futures: list[concurrent.futures.Future[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Fill one future per rank, as each finishes."""
        try:
            tasks = self._start((await self._plan(args, kwargs))[1])
            for task, future in zip(tasks, futures, strict=True):
                if task is not None:
                    task.add_done_callback(functools.partial(_copy_result, future))
            await self._finish(tasks)
        except BaseException as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    async def _plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[MeshPosition] | None, list[Call | None]]:
        args = tuple([await _materialize(value) for value in args])
        kwargs = {name: await _materialize(value) for name, value in kwargs.items()}
        mode = self._rule.mode
        positions = await self._positions(mode.name) if isinstance(mode, Mesh) else None
        calls = plan_calls(self.__name__, self._rule, positions, len(self._workers), args, kwargs)
        return positions, await self._share_between(positions, calls) if positions else calls

    async def _share_between(self, positions: list[MeshPosition], calls: list[Call | None]) -> list[Call | None]:
        """Hand each data-parallel rank's share over once, whatever the number of workers that get it."""
        shared: dict[int, Call] = {}
        for position, call in zip(positions, calls, strict=True):
            if call is not None and position.dp_rank not in shared:
                args = [await self._share(value) for value in call.args]
                shared[position.dp_rank] = Call(
                    args, {key: await self._share(value) for key, value in call.kwargs.items()}
                )
        return [shared[position.dp_rank] for position in positions]

    def _start(self, calls: list[Call | None]) -> list[asyncio.Task[Any] | None]:
        return [
            asyncio.ensure_future(worker.call(self.__name__, *call.args, timeout_s=self._rule.timeout_s, **call.kwargs))
            if call is not None
            else None
            for worker, call in zip(self._workers, calls, strict=True)
        ]

    async def _finish(self, tasks: list[asyncio.Task[Any] | None]) -> None:
        """Wait for all; after a failure cancel the rest and raise one error for all of them."""
        running = {task for task in tasks if task is not None}
        try:
            if running:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            if running:
                _, running = await asyncio.wait(running, timeout=_FAILURE_GRACE_S)
        finally:
            for task in running:
                task.cancel()
        cancelled = [rank for rank, task in enumerate(tasks) if task in running]
        failures = {
            rank: error
            for rank, task in enumerate(tasks)
            if task is not None and task not in running and (error := _error_of(task)) is not None
        }
        if failures:
            names = [worker.name for worker in self._workers]
            raise WorkerGroupError(self.__name__, names, failures, cancelled) from next(iter(failures.values()))


async def _materialize(value: Any) -> Any:
    return await asyncio.wrap_future(value) if isinstance(value, concurrent.futures.Future) else value


def _error_of(task: asyncio.Task[Any]) -> BaseException | None:
    return asyncio.CancelledError("the call was cancelled") if task.cancelled() else task.exception()


def _copy_result(future: concurrent.futures.Future[Any], task: asyncio.Task[Any]) -> None:
    # Failures are told by `_fill`, for all ranks together.
    if not task.cancelled() and task.exception() is None and not future.done():
        future.set_result(task.result())
