"""Run plain functions in threads with a time limit each.

A thread cannot be killed. One whose function outlives its limit is abandoned and replaced, up to a limit; it is a
daemon, so it never keeps the process from ending. Functions that may never end belong into ``processes.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from lit_rl.rewards.result import ScoreTimeout

MAX_ABANDONED_THREADS = 32

_Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class ScoreThreads:
    """A few threads, each running one call at a time; calls beyond that wait.

    Args:
        num_threads: Calls at once, at least 1.
        timeout_s: Limit of one call in seconds, counted from its start.
    """

    def __init__(self, num_threads: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_abandoned = 0
        self._idle: asyncio.LifoQueue[_Thread] = asyncio.LifoQueue()
        for _ in range(num_threads):
            self._idle.put_nowait(_Thread())

    async def call(self, function: Callable[[], Any]) -> Any:
        """Return what ``function`` returns.

        Raises:
            ScoreTimeout: If it runs longer than the limit.
            RuntimeError: If too many earlier calls still run although their time is up.
            Exception: What the function raises.
        """
        if self._num_abandoned >= MAX_ABANDONED_THREADS:
            raise RuntimeError(
                f"{self._num_abandoned} reward calls still run although their time was up, and threads cannot be "
                "killed: set data.rewards.isolation to 'process'."
            )
        thread = await self._idle.get()
        is_usable = False
        try:
            result = thread.start(function)
            done, _ = await asyncio.wait({result}, timeout=self._timeout_s)
            is_usable = bool(done)
            if not done:
                raise ScoreTimeout(self._timeout_s)
            return result.result()
        finally:
            # Also on cancellation: the thread still runs the old call.
            self._idle.put_nowait(thread if is_usable else self._replace(thread))

    def _replace(self, thread: _Thread) -> _Thread:
        self._num_abandoned += 1
        loop = asyncio.get_running_loop()
        thread.stop(lambda: loop.call_soon_threadsafe(self._note_end))
        return _Thread()

    def _note_end(self) -> None:
        self._num_abandoned -= 1

    def close(self) -> None:
        """Let idle threads end. Calls in flight are left to themselves."""
        while not self._idle.empty():
            self._idle.get_nowait().stop(lambda: None)


class _Thread:
    """One daemon thread with its own queue; started with the first call."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | Callable[[], Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="lit_rl-score", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((function, loop, result))
        return result

    def stop(self, on_end: Callable[[], Any]) -> None:
        self._jobs.put(on_end)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            if not isinstance(job, tuple):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    job()
                return
            function, loop, result = job
            value: Any = None
            error: BaseException | None = None
            try:
                value = function()
            except (StopIteration, asyncio.CancelledError) as raised:  # a future refuses or misreads these
                error = RuntimeError(f"the function raised {type(raised).__name__}: {raised}")
            except BaseException as raised:  # SystemExit too: it belongs to the call, not to the thread
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, result, value, error)
            del job, function, result, value, error


def _settle(result: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
        result.exception()  # marks it as seen: nobody may wait any more
