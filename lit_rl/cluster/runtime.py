"""Where workers live, a Ray cluster or this process, and the thread that waits for them.

The trainer's threads are synchronous, all talk with workers is asynchronous: `EventLoopThread` is the bridge.
Importing this module imports no Ray and changes no environment variable (design D18); that happens in `Runtime.start`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import sys
import threading
import uuid
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import psutil

from lit_rl.cluster.guardian import Guardian
from lit_rl.cluster.ray_host import adopt_no_orphans, keep_exit_codes

if TYPE_CHECKING:
    from lit_rl.cluster.worker_group import WorkerGroup

T = TypeVar("T")

# How long a blocked event loop may take to notice a deadline, before the waiting thread gives up on it.
_LOOP_GRACE_S = 10.0


class EventLoopThread:
    """One daemon thread that runs one asyncio loop. It starts with the first coroutine."""

    def __init__(self, name: str = "lit_rl-loop") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return its future; cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float, what: str) -> T:
        """Run a coroutine to its end from an ordinary thread and return its result.

        Args:
            coroutine: Cancelled on timeout and on Ctrl-C.
            timeout_s: Longest wait in seconds.
            what: What is waited for, as it should read after "Timed out after 3 s: ".

        Raises:
            TimeoutError: After ``timeout_s`` seconds; says ``what``.
            RuntimeError: When called from the loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                f"EventLoopThread.run({what!r}) was called on the loop's own thread; await the coroutine instead."
            )
        future = self.submit(_within(coroutine, timeout_s, what))
        try:
            return future.result(timeout_s + _LOOP_GRACE_S)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"Timed out after {timeout_s:g} s: {what} (the event loop is blocked).") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs and end the thread. Idempotent; a later `submit` starts a new one."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        if thread is not threading.current_thread():
            with contextlib.suppress(concurrent.futures.TimeoutError):
                asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(5.0)
        loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(5.0)
            if not thread.is_alive():
                loop.close()


async def _within(coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await coroutine
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"Timed out after {timeout_s:g} s: {what}.") from None
        raise  # the coroutine's own


async def _cancel_all() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=3.0) if tasks else None


class Runtime:
    """The cluster of one run.

    Args:
        backend: ``ray`` (workers are actors) or ``inline`` (workers are objects in this process, no Ray).
        num_cpus: Cores Ray may give out, when the cluster is started here; ``None`` lets Ray count them.
        verbose: Show Ray's log and what workers print.
        address: Cluster to attach to: another rank's `address`. ``None`` takes ``RAY_ADDRESS``, or starts a cluster.
        namespace: Where workers are found by name; another rank's `namespace`, or ``None`` for a new one.
    """

    def __init__(
        self,
        backend: Literal["ray", "inline"] = "ray",
        num_cpus: int | None = None,
        verbose: bool = False,
        *,
        address: str | None = None,
        namespace: str | None = None,
    ) -> None:
        if backend not in ("ray", "inline"):
            raise ValueError(f"Runtime(backend={backend!r}): the backend must be 'ray' or 'inline'.")
        self.backend = backend
        self.num_cpus = num_cpus
        self.verbose = verbose
        self.namespace = namespace or f"lit_rl-{uuid.uuid4().hex[:12]}"
        self.loop = EventLoopThread()
        self._requested_address = address
        self._address: str | None = None
        self._groups: list[WorkerGroup] = []
        self._is_started = False
        self._has_connected = False  # this object called ray.init, so it calls ray.shutdown
        self._session_dir = ""
        self._guardian: Guardian | None = None

    @property
    def address(self) -> str:
        """Address other ranks attach to; empty for the inline backend. The runtime must be started."""
        if self.backend == "inline":
            return ""
        if self._address is None:
            raise RuntimeError("Runtime.address is known after Runtime.start().")
        return self._address

    def start(self) -> None:
        """Start or attach. Idempotent. A cluster the user has connected to in this process is used as it is."""
        if self._is_started:
            return
        if self.backend == "ray":
            # Ray's daemons die with the thread that started them (PR_SET_PDEATHSIG): not a passing one.
            if threading.current_thread() is threading.main_thread():
                self._connect()
            else:
                self.loop.run(self._connect_on_loop(), timeout_s=120.0, what="Ray to start")
        self._is_started = True

    async def _connect_on_loop(self) -> None:
        self._connect()

    def _connect(self) -> None:
        address = self._requested_address or os.environ.get("RAY_ADDRESS") or "local"
        if "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:
            # A local cluster asks for a token (Ray 2.60); another rank must know that before it imports Ray. Against a
            # cluster somebody else runs (RAY_ADDRESS), it is theirs to set.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray

        if not ray.is_initialized():
            starts_cluster = address == "local"
            on_sigterm = signal.getsignal(signal.SIGTERM)
            context: Any = ray.init(
                address=address,
                namespace=self.namespace,
                include_dashboard=False if starts_cluster else None,
                num_cpus=self.num_cpus if starts_cluster else None,
                log_to_driver=self.verbose,
                logging_level=logging.INFO if self.verbose else logging.ERROR,
                # Processes that a killed worker leaves behind are ended by the node's daemon, which adopts them.
                _system_config={"kill_child_processes_on_worker_exit_with_raylet_subreaper": True}
                if starts_cluster
                else None,
            )
            # Ray puts a handler of its own in place, in the main thread (2.60). The default it may replace.
            if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, on_sigterm)
            keep_exit_codes()
            adopt_no_orphans()
            self._has_connected = True
            self._session_dir = str(context.address_info.get("session_dir") or "") if starts_cluster else ""
            self._guardian = Guardian(process.pid for process in _session_processes(self._session_dir))
        else:
            self.namespace = ray.get_runtime_context().namespace
        self._address = str(ray.get_runtime_context().gcs_address)

    def register(self, group: WorkerGroup) -> None:
        """Remember a group so that `stop` ends it."""
        self._groups.append(group)

    def stop(self) -> None:
        """End every worker and, where `start` connected to Ray, leave it. Idempotent; no process stays behind."""
        groups, self._groups = self._groups, []
        if groups:
            with contextlib.suppress(TimeoutError):
                self.loop.run(_stop_all(groups), timeout_s=60.0, what="workers to stop")
        if self._has_connected:
            import ray

            daemons = _session_processes(self._session_dir)
            ray.shutdown()
            _end_processes(daemons)
            if self._guardian is not None:
                self._guardian.stop()
        self._has_connected = self._is_started = False
        self._address = None
        self.loop.stop()

    def __enter__(self) -> Runtime:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


async def _stop_all(groups: list[WorkerGroup]) -> None:
    await asyncio.gather(*(group.stop(timeout_s=10.0) for group in groups), return_exceptions=True)


def _session_processes(session_dir: str) -> list[psutil.Process]:
    """Return Ray's daemons of one session that this process started, with everything below them."""
    if not session_dir:
        return []
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any(session_dir in part for part in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def _end_processes(processes: list[psutil.Process]) -> None:
    """Wait shortly for processes to end by themselves, then kill the rest (a reused pid is never touched)."""
    _, alive = psutil.wait_procs(processes, timeout=5.0)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5.0)
