from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import psutil
import pytest

from lit_rl.cluster import EventLoopThread, Runtime


def test_run_returns_the_result_or_the_coroutines_own_exception() -> None:
    loop = EventLoopThread()

    async def compute() -> int:
        return 5

    async def time_out() -> None:
        raise TimeoutError("the coroutine's own")

    assert loop.run(compute(), timeout_s=5.0, what="five") == 5
    with pytest.raises(TimeoutError, match="the coroutine's own"):
        loop.run(time_out(), timeout_s=5.0, what="nothing")
    loop.stop()


def test_run_says_what_it_waited_for_and_cancels_it() -> None:
    loop = EventLoopThread()
    cancelled = threading.Event()

    async def sleep() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError, match="Timed out after 0.05 s: the sleeper to wake."):
        loop.run(sleep(), timeout_s=0.05, what="the sleeper to wake")
    assert cancelled.wait(5.0)
    loop.stop()


def test_run_refuses_to_wait_for_its_own_thread() -> None:
    loop = EventLoopThread()

    async def nested() -> None:
        loop.run(asyncio.sleep(0), timeout_s=1.0, what="itself")

    with pytest.raises(RuntimeError, match="on the loop's own thread"):
        loop.run(nested(), timeout_s=5.0, what="the outer call")
    loop.stop()


def test_stop_cancels_what_runs_and_can_be_repeated() -> None:
    loop = EventLoopThread()
    future = loop.submit(asyncio.sleep(60))

    loop.stop()
    loop.stop()

    assert future.cancelled()
    assert loop.run(asyncio.sleep(0, 7), timeout_s=5.0, what="a new loop") == 7
    loop.stop()


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="'threads'"):
        Runtime("threads")  # type: ignore[arg-type]


def test_inline_starts_and_stops_any_number_of_times() -> None:
    runtime = Runtime("inline")
    for _ in range(2):
        runtime.start()
        runtime.start()
        runtime.stop()
        runtime.stop()
    assert runtime.address == ""


_PROGRAM = """
import subprocess, sys, time
from lit_rl.cluster import Runtime, WorkerGroup

class Worker:
    def start_child(self):
        import os
        self.child = subprocess.Popen(["sleep", "600"])
        return os.getpid(), self.child.pid

runtime = Runtime("ray", num_cpus=1)
group = WorkerGroup.create(runtime, Worker, 1, name="worker")
pids = runtime.loop.run(group.workers[0].call("start_child", timeout_s=60.0), timeout_s=60.0, what="the worker")
print(*pids, runtime.address, runtime.namespace, flush=True)
if sys.argv[1] == "wait":
    time.sleep(600)
runtime.stop()
runtime.stop()
"""

_SECOND_RANK = """
import sys
from lit_rl.cluster import Runtime, find_worker
with Runtime("ray", address=sys.argv[1], namespace=sys.argv[2]) as runtime:
    worker = find_worker(runtime, "worker-0")
    print(runtime.loop.run(worker.call("start_child", timeout_s=30.0), timeout_s=30.0, what="the worker"))
"""


def _gone(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.slow
def test_two_runs_side_by_side_another_rank_and_a_killed_driver() -> None:
    # One test, because each start of a cluster takes seconds.
    drivers = [
        subprocess.Popen([sys.executable, "-c", _PROGRAM, mode], stdout=subprocess.PIPE, text=True)
        for mode in ("wait", "stop")
    ]
    try:
        answers = [driver.stdout.readline().split() for driver in drivers]  # type: ignore[union-attr]
        assert answers[0][2] != answers[1][2]  # two clusters
        assert drivers[1].wait(60) == 0
        assert _gone([int(pid) for pid in answers[1][:2]], within_s=5.0)

        # The other run is untouched, and a second rank finds its worker by name.
        command = [sys.executable, "-c", _SECOND_RANK, *answers[0][2:]]
        assert answers[0][0] in subprocess.run(command, capture_output=True, text=True, timeout=90).stdout

        started = [int(pid) for pid in answers[0][:2]] + [p.pid for p in psutil.Process(drivers[0].pid).children(True)]
        drivers[0].kill()
        drivers[0].wait(10)
        assert _gone(started, within_s=20.0)
    finally:
        for driver in drivers:
            driver.kill()
