"""Workers that are plain objects in this process: for notebooks, debuggers, tests, closures as rewards or tools.

Async methods run on the runtime's loop, other methods in a thread; deadlines and errors are those of the Ray backend.
Arguments and results are shared, not copied, and per-rank environments do not apply: there is one process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from lit_rl.cluster.handle import WorkerDied, timeout_error
from lit_rl.cluster.runtime import EventLoopThread

T = TypeVar("T")


class InlineWorkerHandle:
    """A worker in this process. Not picklable: another process could not reach it."""

    def __init__(self, name: str, build: Callable[[], Any], loop: EventLoopThread, max_concurrency: int) -> None:
        self._name = name
        self._loop = loop
        self._threads = concurrent.futures.ThreadPoolExecutor(min(32, max_concurrency), thread_name_prefix=name)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_stopped = False
        self._worker = loop.submit(self._build(build))

    @property
    def name(self) -> str:
        """Name of the worker."""
        return self._name

    async def _build(self, build: Callable[[], Any]) -> Any:
        return build()

    async def ready(self, timeout_s: float) -> None:
        """Wait until the worker is constructed; raise what its constructor raised."""
        await self._bounded(self._get_worker(), "__init__", timeout_s)

    async def _get_worker(self) -> Any:
        return await asyncio.shield(asyncio.wrap_future(self._worker))

    async def call(self, method: str, /, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """See `WorkerHandle.call`."""
        return await self._bounded(self._execute(method, args, kwargs), method, timeout_s)

    async def _execute(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        function = getattr(await self._get_worker(), method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        running = asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
        result = await running
        return await result if inspect.isawaitable(result) else result

    async def stream(self, method: str, /, *args: Any, timeout_s: float, **kwargs: Any) -> AsyncIterator[Any]:
        """See `WorkerHandle.stream`."""
        generator: Any = await self._bounded(self._open(method, args, kwargs), method, timeout_s)
        end = object()
        try:
            while (item := await self._bounded(_next_or(generator, end), method, timeout_s)) is not end:
                yield item
        finally:
            if not self._is_stopped:
                await self._on_loop(_close(generator))

    async def _open(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(await self._get_worker(), method)(*args, **kwargs)

    async def stop(self, timeout_s: float) -> None:
        """See `WorkerHandle.stop`; calls in flight end with `WorkerDied`."""
        if self._is_stopped:
            return
        if self._worker.done() and not self._worker.exception() and hasattr(self._worker.result(), "close"):
            with contextlib.suppress(Exception):  # a worker that cannot close is dropped all the same
                await self.call("close", timeout_s=timeout_s)
        self._is_stopped = True
        for task in list(self._tasks):
            self._loop.loop.call_soon_threadsafe(task.cancel)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _bounded(self, coroutine: Coroutine[Any, Any, T], method: str, timeout_s: float) -> T:
        """Run a coroutine on the worker's loop, bounded in time, with the errors every backend raises."""
        if self._is_stopped:
            coroutine.close()
            raise WorkerDied(self._name, "it was stopped")
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                return await self._on_loop(self._tracked(coroutine))
        except TimeoutError as error:
            if limit.expired():
                raise timeout_error(self._name, method, timeout_s) from None
            self._annotate(error, method)
        except Exception as error:
            self._annotate(error, method)

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._is_stopped:
                raise WorkerDied(self._name, "it was stopped") from None
            raise
        finally:
            self._tasks.discard(task)

    async def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine on the runtime's loop from whichever loop this runs on."""
        return await asyncio.wrap_future(self._loop.submit(coroutine))

    def _annotate(self, error: Exception, method: str) -> NoReturn:
        note = f"Raised by {method}() in worker {self._name}."
        if not isinstance(error, WorkerDied) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise error

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"Worker {self._name} runs inline: its handle cannot leave the process. Use Runtime(backend='ray')."
        )


async def _next_or(generator: AsyncIterator[T], end: T) -> T:
    return await anext(generator, end)


async def _close(generator: Any) -> None:
    """Close an async generator; a cancelled ``anext`` may still be unwinding in it, and closing it then is an error."""
    while generator.ag_running:
        await asyncio.sleep(0)
    await generator.aclose()
