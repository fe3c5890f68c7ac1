"""What a caller holds of a worker, whichever backend runs it, and how a worker's death is told.

Everything above the cluster package talks to workers through `WorkerHandle` only. The two implementations are in
``ray_backend.py`` and ``inline_backend.py``; nothing here imports Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol


class WorkerDied(RuntimeError):
    """The process of a worker is gone, or was stopped, while something was asked of it."""

    def __init__(self, name: str, reason: str = "its process is gone") -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

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


def timeout_error(name: str, method: str, timeout_s: float) -> TimeoutError:
    """Return the error of a call that took too long."""
    return TimeoutError(f"Worker {name} did not answer {method}() within {timeout_s:g} s.")
