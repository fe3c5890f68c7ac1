"""Threads for synchronous tools: calls run off the event loop and may be given up.

A thread cannot be killed. A call that is given up (time-out, cancel) therefore keeps its thread, and a new thread
takes its place, up to a limit. Threads are daemons, so a tool that never returns does not keep the process from
ending. The event loop's default executor is left alone: tokenisation uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any


class _Job:
    __slots__ = ("call", "context", "future", "loop", "is_running", "is_given_up")

    def __init__(self, call: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> None:
        self.call = call
        self.context = contextvars.copy_context()
        self.loop = loop
        self.future: asyncio.Future = loop.create_future()
        self.is_running = False
        self.is_given_up = False


class DaemonThreads:
    """A pool of daemon threads whose calls are awaited from an event loop.

    Args:
        max_threads: Calls that run at a time, given-up ones not counted.
        max_given_up: Given-up calls that may still hold a thread; beyond it, new calls are refused.
    """

    def __init__(self, max_threads: int = 32, max_given_up: int = 64) -> None:
        self.max_threads = max_threads
        self.max_given_up = max_given_up
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_pending = 0
        self._num_given_up = 0

    @property
    def num_given_up(self) -> int:
        """Calls that were given up and have not returned yet."""
        return self._num_given_up

    async def run(self, call: Callable[[], Any]) -> Any:
        """Run ``call()`` in a thread and return its result; cancelling gives the call up.

        Raises:
            RuntimeError: If too many given-up calls still hold their threads.
        """
        if self._num_given_up >= self.max_given_up:
            raise RuntimeError(
                f"{self._num_given_up} synchronous tool calls ran past their time limit and never returned. "
                "Give the tool its own time limit, or make it 'async def'."
            )
        job = _Job(call, asyncio.get_running_loop())
        with self._lock:
            self._num_pending += 1
            if self._num_pending > self._num_threads and self._num_threads < self.max_threads:
                self._start_thread()
        self._jobs.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._give_up(job)
            raise

    def _start_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, name="lit-rl-tool", daemon=True).start()

    def _give_up(self, job: _Job) -> None:
        with self._lock:
            job.is_given_up = True
            if job.is_running:
                self._num_given_up += 1
                self._num_threads -= 1
                self._num_pending -= 1
                if self._num_pending > self._num_threads:
                    self._start_thread()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            with self._lock:
                if job.is_given_up:
                    self._num_pending -= 1
                    continue
                job.is_running = True
            result, error = None, None
            try:
                result = job.context.run(job.call)
            except BaseException as raised:
                error = raised
            with self._lock:
                job.is_running = False
                if job.is_given_up:
                    # The thread that replaced this one stays; this one ends.
                    self._num_given_up -= 1
                    return
                self._num_pending -= 1
            _deliver(job, result, error)
            del job, result, error


def _deliver(job: _Job, result: Any, error: BaseException | None) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        job.loop.call_soon_threadsafe(_set_outcome, job.future, result, error)


def _set_outcome(future: asyncio.Future, result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, StopIteration | KeyboardInterrupt | SystemExit | asyncio.CancelledError):
        # A future refuses StopIteration, and the others would end the event loop instead of the call.
        future.set_exception(RuntimeError(f"the tool raised {type(error).__name__}: {error}"))
    else:
        future.set_exception(error)


SYNC_TOOL_THREADS = DaemonThreads()
"""The threads of all synchronous function tools of this process."""
