from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest

from lit_rl.cluster import Runtime, WorkerDied, WorkerGroup, call_again, find_worker


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Worker:
    def __init__(self, rank: int = 0, error: Exception | None = None) -> None:
        if error is not None:
            raise error
        self.rank = rank
        self.num_cancelled = 0
        self.children: list[subprocess.Popen[bytes]] = []

    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def echo_slowly(self, value: Any) -> Any:
        time.sleep(0.05)
        return value, self.rank

    async def fail(self, error: Exception) -> None:
        raise error

    async def sleep(self, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def get_num_cancelled(self) -> int:
        return self.num_cancelled

    async def count(self, stop: int, pause_s: float = 0.0) -> AsyncIterator[int]:
        for number in range(stop):
            yield number
        if pause_s:
            await asyncio.sleep(pause_s)
        raise ValueError("counted to the end")

    async def get_env(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    def start_child(self) -> tuple[int, int]:
        self.children.append(subprocess.Popen(["sleep", "600"]))
        return os.getpid(), self.children[-1].pid

    async def call_other(self, other: Any, value: Any) -> Any:
        return await other.call("echo", value, timeout_s=10.0)


class ClosingWorker(Worker):
    def __init__(self, path: str, hangs: bool = False) -> None:
        super().__init__()
        self.path = path
        self.hangs = hangs

    async def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")
        if self.hangs:
            await asyncio.sleep(60)


def wait(runtime: Runtime, coroutine: Any, timeout_s: float = 30.0) -> Any:
    return runtime.loop.run(coroutine, timeout_s=timeout_s, what="the test")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module", params=["inline", "ray"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    if request.param == "ray":
        yield request.getfixturevalue("ray_runtime")
        return
    with Runtime("inline") as inline:
        yield inline


@pytest.fixture(scope="module")
def group(runtime: Runtime) -> Iterator[WorkerGroup]:
    group = WorkerGroup.create(runtime, Worker, 2, name="pair", per_rank_kwargs=[{"rank": 0}, {"rank": 1}])
    wait(runtime, group.ready(30.0))
    yield group
    wait(runtime, group.stop(2.0))


def test_methods_are_called_by_name_with_their_arguments(runtime: Runtime, group: WorkerGroup) -> None:
    assert wait(runtime, group.workers[0].call("echo", 1, [2], timeout_s=10.0, key="v")) == ((1, [2]), {"key": "v"})
    assert wait(runtime, group.workers[1].call("echo_slowly", "x", timeout_s=10.0)) == ("x", 1)


def test_ordinary_methods_do_not_block_each_other(runtime: Runtime, group: WorkerGroup) -> None:
    async def run() -> list[Any]:
        slow = [group.workers[0].call("echo_slowly", i, timeout_s=10.0) for i in range(8)]
        quick = await group.workers[0].call("echo", timeout_s=10.0)
        return [quick, *await asyncio.gather(*slow)]

    assert wait(runtime, run()) == [((), {}), *((i, 0) for i in range(8))]


def test_an_exception_keeps_its_type_and_tells_the_worker(runtime: Runtime, group: WorkerGroup) -> None:
    with pytest.raises(KeyError, match="gone") as caught:
        wait(runtime, group.workers[1].call("fail", KeyError("gone"), timeout_s=10.0))

    assert "Raised by fail() in worker pair-1" in caught.value.__notes__[0]


def test_an_exception_that_cannot_be_pickled_is_quoted(ray_runtime: Runtime) -> None:
    group = WorkerGroup.create(ray_runtime, FailsUnpicklably, 1, name="unpicklable")
    with pytest.raises(RuntimeError, match="UnpicklableError: 1 and 2"):
        wait(ray_runtime, group.workers[0].call("run", timeout_s=20.0))
    wait(ray_runtime, group.stop(2.0))


class FailsUnpicklably:
    async def run(self) -> None:
        raise UnpicklableError(1, 2)


def test_an_unknown_method_is_told_by_name(runtime: Runtime, group: WorkerGroup) -> None:
    with pytest.raises(AttributeError, match="no_such_method"):
        wait(runtime, group.workers[0].call("no_such_method", timeout_s=10.0))


def test_a_timeout_names_worker_method_and_seconds_and_cancels_the_call(runtime: Runtime, group: WorkerGroup) -> None:
    async def run() -> int:
        before = await group.workers[0].call("get_num_cancelled", timeout_s=10.0)
        with pytest.raises(TimeoutError, match=r"pair-0 did not answer sleep\(\) within 0.2 s"):
            await group.workers[0].call("sleep", 60.0, timeout_s=0.2)
        for _ in range(100):
            if (after := await group.workers[0].call("get_num_cancelled", timeout_s=10.0)) > before:
                break
            await asyncio.sleep(0.02)
        return after - before

    assert wait(runtime, run()) == 1


def test_cancelling_the_caller_cancels_the_call(runtime: Runtime, group: WorkerGroup) -> None:
    async def run() -> int:
        before = await group.workers[1].call("get_num_cancelled", timeout_s=10.0)
        call = asyncio.create_task(group.workers[1].call("sleep", 60.0, timeout_s=60.0))
        await asyncio.sleep(0.1)
        call.cancel()
        for _ in range(100):
            if (after := await group.workers[1].call("get_num_cancelled", timeout_s=10.0)) > before:
                break
            await asyncio.sleep(0.02)
        return after - before

    assert wait(runtime, run()) == 1


def test_a_stream_yields_items_and_then_the_exception(runtime: Runtime, group: WorkerGroup) -> None:
    seen = []

    async def run() -> None:
        async for item in group.workers[0].stream("count", 3, timeout_s=10.0):
            seen.append(item)

    with pytest.raises(ValueError, match="counted to the end"):
        wait(runtime, run())
    assert seen == [0, 1, 2]


def test_a_stream_times_out_per_item(runtime: Runtime, group: WorkerGroup) -> None:
    async def run() -> None:
        async for _ in group.workers[0].stream("count", 2, 60.0, timeout_s=0.5):
            pass

    with pytest.raises(TimeoutError, match=r"count\(\) within 0.5 s"):
        wait(runtime, run())


def test_a_stream_can_be_left_early(runtime: Runtime, group: WorkerGroup) -> None:
    async def run() -> int:
        stream = group.workers[0].stream("count", 100, timeout_s=10.0)
        first: int = await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        return first

    assert wait(runtime, run()) == 0


def test_a_constructor_that_fails_is_told_by_ready_and_by_calls(runtime: Runtime) -> None:
    group = WorkerGroup.create(runtime, Worker, 1, name="broken", kwargs={"error": OSError("no such model")})
    with pytest.raises(OSError, match="no such model"):
        wait(runtime, group.ready(30.0))
    with pytest.raises(OSError, match="no such model"):
        wait(runtime, group.workers[0].call("echo", timeout_s=10.0))
    wait(runtime, group.stop(2.0))


def test_stopping_closes_the_worker_once_and_ends_its_calls(runtime: Runtime, tmp_path: Any) -> None:
    path = tmp_path / "log"
    group = WorkerGroup.create(runtime, ClosingWorker, 1, name="closing", kwargs={"path": str(path)})

    async def run() -> None:
        await group.ready(30.0)
        call = asyncio.create_task(group.workers[0].call("sleep", 60.0, timeout_s=60.0))
        await asyncio.sleep(0.1)
        await group.stop(5.0)
        with pytest.raises(WorkerDied, match="closing-0"):
            await call
        await group.stop(5.0)
        with pytest.raises(WorkerDied, match="closing-0"):
            await group.workers[0].call("echo", timeout_s=10.0)

    wait(runtime, run())
    assert path.read_text() == "closed\n"


def test_a_worker_that_does_not_close_is_ended_after_the_timeout(runtime: Runtime, tmp_path: Any) -> None:
    kwargs = {"path": str(tmp_path / "log"), "hangs": True}
    group = WorkerGroup.create(runtime, ClosingWorker, 1, name="stubborn", kwargs=kwargs)
    wait(runtime, group.ready(30.0))
    wait(runtime, group.stop(0.3), timeout_s=10.0)
    with pytest.raises(WorkerDied):
        wait(runtime, group.workers[0].call("echo", timeout_s=10.0))


def test_a_killed_worker_is_told_at_once_and_its_children_are_gone(ray_runtime: Runtime) -> None:
    group = WorkerGroup.create(ray_runtime, Worker, 1, name="victim")
    worker = group.workers[0]
    pid, child = wait(ray_runtime, worker.call("start_child", timeout_s=30.0))
    call = ray_runtime.loop.submit(worker.call("sleep", 60.0, timeout_s=60.0))
    wait(ray_runtime, worker.call("echo", timeout_s=10.0))

    os.kill(pid, 9)

    with pytest.raises(WorkerDied, match="victim-0"):
        call.result(10.0)
    for _ in range(100):
        if not is_running(child):
            break
        time.sleep(0.05)
    assert not is_running(child)


def test_a_killed_worker_that_restarts_is_built_anew_under_the_same_handle(ray_runtime: Runtime) -> None:
    # Given what it is built with, in the environment it was given.
    group = WorkerGroup.create(
        ray_runtime,
        Worker,
        1,
        name="phoenix",
        kwargs={"rank": 7},
        env={"LIT_RL_TEST": "set", "HOME": None},
        restarts=True,
    )
    worker = group.workers[0]
    wait(ray_runtime, group.ready(60.0))
    pid, child = wait(ray_runtime, worker.call("start_child", timeout_s=30.0))

    os.kill(pid, 9)

    assert wait(ray_runtime, call_again(worker, "echo_slowly", "again", timeout_s=60.0), 90.0) == ("again", 7)
    assert wait(ray_runtime, worker.call("get_env", "LIT_RL_TEST", "HOME", timeout_s=30.0)) == ["set", None]
    new_pid, new_child = wait(ray_runtime, worker.call("start_child", timeout_s=30.0))
    assert new_pid != pid
    wait(ray_runtime, group.stop(5.0), 30.0)
    for process in (pid, child, new_pid, new_child):
        assert not is_running(process)
    with pytest.raises(WorkerDied):
        wait(ray_runtime, worker.call("echo", timeout_s=10.0), 20.0)


def test_call_again_gives_up_where_nothing_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rl.cluster.handle.RESTART_PAUSES_S", (0.01, 0.01))

    class Dying:
        def __init__(self, is_restarting: bool) -> None:
            self.is_restarting, self.num_calls = is_restarting, 0

        async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
            self.num_calls += 1
            raise WorkerDied("w-0", "killed", self.is_restarting)

    for is_restarting, num_calls in ((True, 3), (False, 1)):
        worker = Dying(is_restarting)
        with pytest.raises(WorkerDied, match="Worker w-0 died: killed"):
            asyncio.run(call_again(worker, "score", timeout_s=1.0))  # type: ignore[arg-type]
        assert worker.num_calls == num_calls
    error = pickle.loads(pickle.dumps(WorkerDied("w-0", "killed", True)))
    assert (error.name, error.reason, error.is_restarting) == ("w-0", "killed", True)


def test_stopping_leaves_neither_process_nor_children(ray_runtime: Runtime) -> None:
    group = WorkerGroup.create(ray_runtime, Worker, 1, name="parent")
    pid, child = wait(ray_runtime, group.workers[0].call("start_child", timeout_s=30.0))

    wait(ray_runtime, group.stop(5.0))

    assert not is_running(pid)
    assert not is_running(child)


def test_environment_is_set_per_rank_and_training_ranks_are_hidden(
    ray_runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    env: list[dict[str, str | None]] = [{"LIT_RL_TEST": "zero"}, {"LIT_RL_TEST": "one", "HOME": None}]
    group = WorkerGroup.create(ray_runtime, Worker, 2, name="env", env=env)

    async def run() -> list[Any]:
        names = ("LIT_RL_TEST", "RANK", "WORLD_SIZE", "MASTER_PORT")
        first = await group.workers[0].call("get_env", *names, timeout_s=30.0)
        return [first, await group.workers[1].call("get_env", "LIT_RL_TEST", "HOME", timeout_s=30.0)]

    assert wait(ray_runtime, run()) == [["zero", None, None, None], ["one", None]]
    wait(ray_runtime, group.stop(2.0))


def test_a_handle_works_from_another_worker_and_by_name(ray_runtime: Runtime) -> None:
    group = WorkerGroup.create(ray_runtime, Worker, 2, name="talk")

    assert wait(ray_runtime, group.workers[0].call("call_other", group.workers[1], 5, timeout_s=30.0)) == ((5,), {})
    assert wait(ray_runtime, find_worker(ray_runtime, "talk-1").call("echo", 6, timeout_s=10.0)) == ((6,), {})
    wait(ray_runtime, group.stop(2.0))


def test_a_name_is_free_again_after_stop(ray_runtime: Runtime) -> None:
    for _ in range(2):
        group = WorkerGroup.create(ray_runtime, Worker, 1, name="again")
        wait(ray_runtime, group.ready(30.0))
        wait(ray_runtime, group.stop(2.0))


def test_an_inline_handle_says_that_it_cannot_travel(inline_runtime: Runtime) -> None:
    group = WorkerGroup.create(inline_runtime, Worker, 1, name="here")

    with pytest.raises(TypeError, match="here-0 runs inline"):
        pickle.dumps(group.workers[0])
    with pytest.raises(ValueError, match="inline workers have no name"):
        find_worker(inline_runtime, "here-0")


def test_inline_workers_answer_from_any_event_loop(inline_runtime: Runtime) -> None:
    group = WorkerGroup.create(inline_runtime, Worker, 1, name="here")

    assert asyncio.run(group.workers[0].call("echo", 1, timeout_s=10.0)) == ((1,), {})


def test_wrong_numbers_of_workers_are_refused_by_name(inline_runtime: Runtime) -> None:
    with pytest.raises(ValueError, match="num_workers=0"):
        WorkerGroup.create(inline_runtime, Worker, 0, name="none")
    with pytest.raises(ValueError, match="per_rank_kwargs has 1 entries for 2 workers"):
        WorkerGroup.create(inline_runtime, Worker, 2, name="uneven", per_rank_kwargs=[{}])


def test_importing_the_package_starts_nothing() -> None:
    program = (
        "import os, sys; before = dict(os.environ); import lit_rl.cluster, lit_rl.serving; "
        "assert dict(os.environ) == before; "
        "assert not {'ray', 'torch', 'lightning', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
