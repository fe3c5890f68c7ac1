"""The Ray actor that holds one worker object and calls its methods by name.

Runs inside the worker's process. The worker's class arrives only after the environment is set, in `start`, so whatever
its module reads at import time is already right. Nothing here decides where or how often a worker runs.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import inspect
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import psutil

from lit_rl.cluster.guardian import guard_children

# Set by a trainer's launcher and inherited through Ray: a worker must not take itself for a training rank (vLLM would).
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)

_PARENT_POLL_S = 0.25
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclass
class Failure:
    """An exception on its way back: pickled where that works, and as text."""

    pickled: bytes | None
    text: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe an exception; one that does not survive pickling is carried as text."""
        import cloudpickle

        text = f"{type(error).__module__}.{type(error).__qualname__}: {error}"
        trace = "".join(traceback.format_exception(error))
        try:
            pickled = cloudpickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # anything can go wrong in a foreign exception's __reduce__ or __init__
            return cls(None, text, trace)
        return cls(pickled, text, trace)

    def restore(self) -> Exception:
        """Return the exception in its own type, or a `RuntimeError` that quotes it."""
        if self.pickled is not None:
            with contextlib.suppress(Exception):
                error = pickle.loads(self.pickled)
                if isinstance(error, Exception):
                    return error
        return RuntimeError(self.text)


@dataclass
class ProcessIdentity:
    """A process, told apart from a later one with the same pid."""

    host: str
    pid: int
    create_time: float

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Describe this process."""
        return cls(socket.gethostname(), os.getpid(), psutil.Process().create_time())

    def find(self) -> psutil.Process | None:
        """Return the process if it runs on this machine and is the same one."""
        if self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
            return process if abs(process.create_time() - self.create_time) < 1.0 else None
        except psutil.Error:
            return None

    def may_live(self) -> bool:
        """Return whether the process still runs; of one on another machine that is not known, so True."""
        if self.host != socket.gethostname():
            return True
        process = self.find()
        with contextlib.suppress(psutil.Error):
            return process is not None and process.status() != psutil.STATUS_ZOMBIE
        return False


class WorkerHost:
    """Actor around one worker object.

    Args:
        search_path: The driver's ``sys.path``: entries missing here are appended, so that its modules are found.
        env: Environment of the worker; ``None`` removes a variable.
        blueprint: Reference to the worker's class and arguments, in a list so that it stays one. With it, a process
            that Ray starts in the place of a dead one builds the worker anew; otherwise `start` brings them.
    """

    def __init__(self, search_path: list[str], env: dict[str, str | None], blueprint: list[Any] | None = None) -> None:
        sys.path += [entry for entry in search_path if entry not in sys.path]
        for variable in RANK_VARIABLES:
            os.environ.pop(variable, None)
        for variable, value in env.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        keep_exit_codes()
        self._guardian = guard_children()
        self._blueprint = blueprint
        self._build_lock = asyncio.Lock()
        self._worker: Any = None
        self._failure: Failure | None = None
        self._is_ready = asyncio.Event()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._threads = concurrent.futures.ThreadPoolExecutor(32, thread_name_prefix="worker")
        threading.Thread(target=_die_with_parent, args=(os.getppid(),), name="parent-watch", daemon=True).start()

    async def identity(self) -> ProcessIdentity:
        """Say which process this is."""
        return ProcessIdentity.current()

    async def start(self, worker_cls: type, kwargs: dict[str, Any]) -> Failure | None:
        """Construct the worker."""
        try:
            self._worker = worker_cls(**kwargs)
        except Exception as error:
            self._failure = Failure.of(error)
        self._is_ready.set()
        return self._failure

    async def start_from_blueprint(self) -> Failure | None:
        """Construct the worker from the blueprint, once."""
        async with self._build_lock:
            if self._blueprint is not None and not self._is_ready.is_set():
                await self.start(*await self._blueprint[0])
        return self._failure

    async def _wait_until_ready(self) -> None:
        await self.start_from_blueprint()
        await self._is_ready.wait()

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker; an exception comes back as a `Failure`."""
        try:
            function = self._functions.get(method) or await self._bind(method)
            return await function(*args, **kwargs)
        except Exception as error:
            return self._failure or Failure.of(error)

    async def stream(self, method: str, /, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Yield from an async generator method of the worker; an exception is the last item, as a `Failure`."""
        try:
            await self._wait_until_ready()
            async for item in getattr(self._worker, method)(*args, **kwargs):
                yield item
        except Exception as error:
            yield self._failure or Failure.of(error)

    async def _bind(self, method: str) -> Callable[..., Any]:
        await self._wait_until_ready()
        function = getattr(self._worker, method)
        self._functions[method] = function if inspect.iscoroutinefunction(function) else self._threaded(function)
        return self._functions[method]

    def _threaded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # An ordinary method on an async actor's loop would block every other call.
        async def run(*args: Any, **kwargs: Any) -> Any:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))
            return await result if inspect.isawaitable(result) else result

        return run

    async def shutdown(self) -> None:
        """Close the worker, where it has a ``close`` method, and end every process below this one."""
        if hasattr(self._worker, "close"):
            await self.call("close")
        children = psutil.Process().children(recursive=True)
        await asyncio.to_thread(end_processes, children, 2.0)


def keep_exit_codes() -> None:
    """Let this process wait for its children again, after Ray has connected it.

    Where the sub-reaper is on, Ray ignores SIGCHLD in drivers and workers (2.60): the exit code of every child is lost,
    and `subprocess` reports 0 for all of them, to rewards and tools as well.
    """
    # In C: Python sets signals from the main thread only, which in Ray's workers runs none of our code.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGCHLD, signal.SIG_DFL)


def adopt_no_orphans() -> None:
    """Undo that Ray made this process the parent of every orphan below it (2.60): nobody here would wait for them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def end_processes(processes: list[psutil.Process], grace_s: float) -> None:
    """Terminate processes, and kill those that are still there after ``grace_s`` seconds."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=2.0)


def _die_with_parent(parent: int) -> None:
    """End this process once the node's daemon is gone: a killed driver takes its daemons with it."""
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)  # the guardian ends the children
