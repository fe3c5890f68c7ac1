"""What a caller holds of a worker, whichever backend runs it, and how a worker's death is told.

Everything above the cluster package talks to workers through `WorkerHandle` only. The two implementations are in
``ray_backend.py`` and ``inline_backend.py``; nothing here imports Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

RESTART_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Waits for a worker that starts again. Few: what is asked of it may be what kills it."""


class WorkerDied(RuntimeError):
    """The process of a worker is gone, or was stopped, while something was asked of it.

    Attributes:
        name: Of the worker.
        reason: What is known.
        is_restarting: Whether a new process takes its place under the same handle, so that asking again makes sense.
    """

    def __init__(self, name: str, reason: str = "its process is gone", is_restarting: bool = False) -> None:
        super().__init__(name, reason, is_restarting)
        self.name = name
        self.reason = reason
        self.is_restarting = is_restarting

    def __str__(self) -> str:
        return f"Worker {self.name} died: {self.reason}"


class WorkerHandle(Protocol):
    """One worker. A Ray-backed handle can be pickled and used from any process of the cluster."""

    @property
    def name(self) -> str:
        """Name of the worker, unique within the runtime."""

    async def ready(self, timeout_s: float) -> None:
        """Wait until the worker is constructed, at most ``timeout_s`` seconds; raise what its constructor raised."""

    async def call(self, method: str, /, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Return what ``method`` returns; ``def`` methods run in a thread, ``async def`` methods on the worker's loop.

        With Ray, arguments and result are copied; inline they are the same objects. An `ObjectRef` given as an argument
        arrives as its value, one inside a container stays a reference.

        Raises:
            TimeoutError: After ``timeout_s`` seconds; names worker and method. The call is cancelled (a ``def`` method
                that already runs in its thread is left to finish).
            WorkerDied: The worker is gone.
            Exception: What the method raised, in its own type, with worker and remote traceback as a note.
        """

    def stream(self, method: str, /, *args: Any, timeout_s: float, **kwargs: Any) -> AsyncIterator[Any]:
        """Yield what the generator ``method`` yields, ``timeout_s`` seconds for each item. Errors as in `call`."""

    async def stop(self, timeout_s: float) -> None:
        """Ask the worker's ``close`` method, where it has one, then end the worker and its child processes. Idempotent.

        Never raises for a worker that is dead or does not answer within ``timeout_s`` seconds: it is killed.
        """


async def call_again(handle: WorkerHandle, method: str, /, *args: Any, timeout_s: float) -> Any:
    """Call a worker, and again while a new process takes the place of one that died.

    Args:
        handle: The worker.
        method: What may be called twice: whether a call was carried out before the death is unknown.
        *args: Its arguments.
        timeout_s: Longest wait for one call, in seconds.

    Raises:
        WorkerDied: If the worker does not start again, or dies each time.
        Exception: As in `WorkerHandle.call`.
    """
    for pause_s in RESTART_PAUSES_S:
        try:
            return await handle.call(method, *args, timeout_s=timeout_s)
        except WorkerDied as error:
            if not error.is_restarting:
                raise
        await asyncio.sleep(pause_s)
    return await handle.call(method, *args, timeout_s=timeout_s)


def timeout_error(name: str, method: str, timeout_s: float) -> TimeoutError:
    """Return the error of a call that took too long."""
    return TimeoutError(f"Worker {name} did not answer {method}() within {timeout_s:g} s.")
