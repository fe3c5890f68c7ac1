"""The order and the proof of a weight update, with replicas that only record (inline backend)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lit_rl.cluster import Runtime, WorkerDied
from lit_rl.serving.load_balancer import LoadBalancer
from lit_rl.serving.manager import EngineStartFailed, LLMServerManager, WeightUpdateFailed
from lit_rl.serving.replica import WeightReport
from lit_rl.serving.settings import ServingSettings
from lit_rl.types import SamplingParams, TokenOutput

SENT = {"a": 8, "b": 4}


class RecordingReplica:
    """Writes every call into ``engine_args["calls"]``; ``engine_args["script"][rank][method]`` replaces what it does.

    A script is an exception to raise, ``"hang"``, or a report to return.
    """

    def __init__(self, model: str, settings: ServingSettings, max_model_len: int, rank: int, gpu: bool) -> None:
        self.rank = rank
        self.version = -1
        self.calls = settings.engine_args["calls"]
        self.script = settings.engine_args.get("script", {}).get(rank, {})
        self.received: dict[str, int] = {}

    async def _record(self, method: str, *details: Any) -> Any:
        self.calls.append((self.rank, method, *details))
        step = self.script.get(method)
        if isinstance(step, Exception):
            raise step
        if step == "hang":
            await asyncio.sleep(60)
        return step

    async def start(self) -> None:
        await self._record("start")

    async def pause(self) -> None:
        await self._record("pause")

    async def resume(self) -> None:
        await self._record("resume")

    async def wake(self) -> None:
        await self._record("wake")

    async def start_weight_update(self) -> None:
        self.received = {}
        await self._record("start_weight_update")

    async def update_weights(self, bucket: dict[str, Any]) -> None:
        self.received |= bucket["sizes"]
        await self._record("update_weights", tuple(bucket["sizes"]))

    async def finish_weight_update(self, version: int) -> WeightReport:
        report = await self._record("finish_weight_update", version)
        self.version = version
        return report or WeightReport(version=version, bytes_received=dict(self.received), checksum=f"sum {version}")

    async def health(self) -> dict[str, Any]:
        await self._record("health")
        return {"version": self.version}

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        return TokenOutput(token_ids=[9], logprobs=[-1.0], stop_reason="stop", policy_versions=[self.version])

    async def close(self) -> None:
        self.calls.append((self.rank, "close"))


def make_manager(runtime: Runtime, script: dict[int, Any] | None = None, *, replicas: int = 2) -> LLMServerManager:
    settings = ServingSettings(
        replica=f"{__name__}.RecordingReplica",
        num_replicas=replicas,
        start_timeout_s=0.3,
        weight_update_timeout_s=0.3,
        engine_args={"calls": [], "script": script or {}},
    )
    return LLMServerManager(runtime, settings, "some-model", 64, gpu=False)


def manage(use: Callable[[LLMServerManager], Awaitable[None]], script: dict[int, Any] | None = None) -> list[Any]:
    """Run ``use`` with a started manager of two replicas and return the calls they recorded."""
    with Runtime("inline") as runtime:
        manager = make_manager(runtime, script)

        async def run() -> None:
            await manager.start()
            try:
                await use(manager)
            finally:
                await manager.stop()

        runtime.loop.run(run(), timeout_s=20.0, what="the test")
    return manager.settings.engine_args["calls"]


async def update(manager: LLMServerManager, version: int) -> None:
    await manager.begin_weight_update()
    await manager.send_bucket({"path": "-", "sizes": {"a": 8}})
    await manager.send_bucket({"path": "-", "sizes": {"b": 4}})
    await manager.finish_weight_update(version, SENT)


# O41
def test_an_update_pauses_wakes_loads_every_bucket_finishes_and_resumes_in_that_order() -> None:
    async def use(manager: LLMServerManager) -> None:
        await update(manager, 0)
        await update(manager, 1)

    calls = manage(use)

    one = [
        ("pause",),
        ("wake",),
        ("start_weight_update",),
        ("update_weights", ("a",)),
        ("update_weights", ("b",)),
    ]
    expected = [("start",)]
    for version in (0, 1):
        expected += [*one, ("finish_weight_update", version), ("resume",)]
    for rank in (0, 1):
        assert [tuple(details) for r, *details in calls if r == rank] == [*expected, ("close",)]


# O41: no replica is a step ahead of another.
def test_no_replica_resumes_before_every_replica_has_finished() -> None:
    async def use(manager: LLMServerManager) -> None:
        await update(manager, 0)

    methods = [method for _, method, *_ in manage(use)]

    assert methods.index("resume") > max(i for i, method in enumerate(methods) if method == "finish_weight_update")
    assert methods.index("update_weights") > max(i for i, method in enumerate(methods) if method == "pause")


# O41
def test_versions_follow_the_updates_and_are_on_what_is_sampled_next() -> None:
    async def use(manager: LLMServerManager) -> None:
        assert set(manager.versions.values()) == {-1}
        await update(manager, 3)
        assert set(manager.versions.values()) == {3}
        assert [answer["version"] for answer in await manager.health()] == [3, 3]
        await update(manager, 4)
        output = await manager.client().generate([1], SamplingParams(max_tokens=1), "c")
        assert output.policy_versions == [4]

    manage(use)


def test_collecting_is_refused_with_other_weights_than_the_iteration_needs() -> None:
    async def use(manager: LLMServerManager) -> None:
        with pytest.raises(RuntimeError) as not_synced:
            manager.require_version(0, 0)
        assert str(not_synced.value) == (
            "The replicas hold the weights they were started with, iteration 0 needs version 0: "
            "is the WeightSync callback in trainer.callbacks?"
        )
        await update(manager, 3)
        manager.require_version(3, 3)
        with pytest.raises(RuntimeError, match="hold version 3, iteration 4 needs version 4: is the WeightSync"):
            manager.require_version(4, 4)
        manager.versions["replica-1"] = 4
        with pytest.raises(RuntimeError, match="hold version 3, version 4, iteration 4 needs version 4"):
            manager.require_version(4, 4)

    manage(use)


@pytest.mark.parametrize(
    ("received", "words"),
    [
        ({"a": 8}, r"missing \['b'\]"),
        ({"a": 8, "b": 4, "c": 1}, r"unexpected \['c'\]"),
        ({"a": 8, "b": 2}, r"wrong size\s+\['b'\]"),
    ],
)
def test_a_replica_that_received_other_names_or_sizes_than_were_sent_is_named(
    received: dict[str, int], words: str
) -> None:
    async def use(manager: LLMServerManager) -> None:
        with pytest.raises(WeightUpdateFailed, match=f"replica-1 did not receive what was sent: .*{words}"):
            await update(manager, 0)

    script = {1: {"finish_weight_update": WeightReport(version=0, bytes_received=received, checksum="sum 0")}}

    assert "resume" not in [method for _, method, *_ in manage(use, script)]


def test_names_that_no_parameter_consumed_are_an_error() -> None:
    async def use(manager: LLMServerManager) -> None:
        with pytest.raises(WeightUpdateFailed, match=r"replica-0 .*unused \['b'\]"):
            await update(manager, 0)

    report = WeightReport(version=0, bytes_received=SENT, checksum="sum 0", unused_names=["b"])
    manage(use, {0: {"finish_weight_update": report}})


def test_replicas_with_different_checksums_are_an_error() -> None:
    async def use(manager: LLMServerManager) -> None:
        with pytest.raises(WeightUpdateFailed, match=r"version 0 the replicas hold different weights: .*-1.*odd"):
            await update(manager, 0)

    manage(use, {1: {"finish_weight_update": WeightReport(version=0, bytes_received=SENT, checksum="odd")}})


def test_an_update_that_changes_nothing_is_seen() -> None:
    same = WeightReport(version=1, bytes_received=SENT, checksum="sum 0")

    async def use(manager: LLMServerManager) -> None:
        await update(manager, 0)
        assert manager.weights_changed
        await update(manager, 1)
        assert manager.weights_changed is False

    manage(use, {rank: {"finish_weight_update": same} for rank in (0, 1)})


# O41
@pytest.mark.parametrize("method", ["pause", "wake", "start_weight_update", "update_weights", "finish_weight_update"])
@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), "hang"])
def test_a_second_replica_that_fails_or_hangs_is_named_within_the_timeout(method: str, failure: Any) -> None:
    async def use(manager: LLMServerManager) -> None:
        with pytest.raises(WeightUpdateFailed, match=rf"^{method} failed on 1 of 2 replicas: replica-1: ") as error:
            await update(manager, 0)
        words = "TimeoutError: .* 0.3 s" if failure == "hang" else "RuntimeError: out of memory"
        error.match(words)  # after 0.3 s, not after the 60 s that the replica hangs: `manage` waits for 20

    assert "resume" not in [called for _, called, *_ in manage(use, {1: {method: failure}})]


def test_after_a_failed_update_no_version_is_claimed() -> None:
    async def use(manager: LLMServerManager) -> None:
        await update(manager, 0)
        failing = manager.replicas.workers[1]._worker.result()
        failing.script = {"update_weights": RuntimeError("half-way")}
        with pytest.raises(WeightUpdateFailed):
            await update(manager, 1)
        with pytest.raises(RuntimeError, match="hold a half-finished update, iteration 0 needs version 0"):
            manager.require_version(0, 0)
        failing.script = {}
        await update(manager, 1)
        manager.require_version(1, 1)

    manage(use)


@pytest.mark.parametrize("failure", [OSError("no weights in some-model"), "hang"])
def test_an_engine_that_does_not_start_is_told_in_its_own_words_and_all_are_stopped(failure: Any) -> None:
    words = r"did not answer start\(\) within 0.3 s" if failure == "hang" else "OSError: no weights in some-model"
    with Runtime("inline") as runtime:
        manager = make_manager(runtime, {1: {"start": failure}})
        with pytest.raises(EngineStartFailed, match=rf"did not start with model 'some-model': .*{words}"):
            runtime.loop.run(manager.start(), timeout_s=20.0, what="replicas to start")

        calls = manager.settings.engine_args["calls"]
        assert sorted(rank for rank, method, *_ in calls if method == "close") == [0, 1]
        assert manager.replicas is None
        with pytest.raises(RuntimeError, match="before start"):
            manager.client()


def test_replicas_are_stopped_too_when_the_balancer_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: LoadBalancer, servers: Any) -> None:
        raise ValueError("no balancer today")

    monkeypatch.setattr(LoadBalancer, "__init__", refuse)
    with Runtime("inline") as runtime:
        manager = make_manager(runtime)
        with pytest.raises(EngineStartFailed, match="no balancer today"):
            runtime.loop.run(manager.start(), timeout_s=20.0, what="replicas to start")

        assert [method for _, method, *_ in manager.settings.engine_args["calls"]].count("close") == 2


def test_a_dead_replica_fails_the_health_check() -> None:
    async def use(manager: LLMServerManager) -> None:
        await manager.replicas.workers[1].stop(timeout_s=5.0)
        with pytest.raises(WorkerDied, match="replica-1"):
            await manager.health()

    manage(use)


def test_stopping_twice_is_harmless() -> None:
    async def use(manager: LLMServerManager) -> None:
        await manager.stop()
        await manager.stop()

    assert [method for _, method, *_ in manage(use)].count("close") == 2


def test_an_unknown_replica_class_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match=r"data.serving.replica='no.such.Replica' is neither one of \['transfor"):
        ServingSettings(replica="no.such.Replica")
    with pytest.raises(ValueError, match=r"data.serving.replica='lit_rl.types.Prompt' is no class with the methods"):
        ServingSettings(replica="lit_rl.types.Prompt")


@pytest.mark.parametrize(
    ("option", "value"),
    [("first_core", -1), ("seed", -1), ("kv_cache_gib", float("nan")), ("kv_cache_gib", float("inf"))]
    + [("weight_bucket_mib", 0), ("threads_per_replica", -1), ("gpu_memory_utilization", float("nan"))],
)
def test_a_number_out_of_its_range_is_refused_with_its_option(option, value) -> None:
    with pytest.raises(ValueError, match=rf"data\.serving\.{option}={value}"):
        ServingSettings(**{option: value})
