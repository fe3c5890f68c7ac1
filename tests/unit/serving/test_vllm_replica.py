"""What of the vLLM replica needs no engine: environment, cores, settings, and how requests and answers translate."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lit_rl.serving import settings as settings_module
from lit_rl.serving.settings import ServingSettings
from lit_rl.serving.vllm_replica import VLLMReplica, replica_environment
from lit_rl.types import SamplingParams


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of which this process may use the cores 4 to 11."""
    monkeypatch.setattr(settings_module.os, "sched_getaffinity", lambda pid: set(range(4, 12)), raising=False)


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        ({"num_replicas": 2}, [[4, 5, 6, 7], [8, 9, 10, 11]]),
        ({"num_replicas": 3}, [[4, 5], [6, 7], [8, 9]]),
        ({"num_replicas": 2, "threads_per_replica": 3}, [[4, 5, 6], [7, 8, 9]]),
        ({"num_replicas": 2, "threads_per_replica": 3, "first_core": 6}, [[4, 10, 11], [5, 6, 7]]),
        ({"threads_per_replica": 20}, [[4, 5, 6, 7, 8, 9, 10, 11]]),
    ],
)
@pytest.mark.usefixtures("eight_cores")
def test_replicas_get_neighbouring_cores_among_those_allowed(options: dict[str, int], cores: list[list[int]]) -> None:
    settings = ServingSettings(**options)

    assert [settings.cores_of(rank) for rank in range(settings.num_replicas)] == cores


@pytest.mark.usefixtures("eight_cores")
def test_more_replicas_than_cores_get_one_core_each() -> None:
    settings = ServingSettings(num_replicas=10)

    assert [settings.cores_of(rank) for rank in (0, 7, 8, 9)] == [[4], [11], [4], [5]]


@pytest.mark.usefixtures("eight_cores")
def test_a_cpu_replica_is_told_its_cores_and_threads() -> None:
    environment = replica_environment(ServingSettings(num_replicas=2), 1, verbose=False, gpu=False)

    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "8,9,10,11"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert environment["VLLM_PLUGINS"] == "lit_rl"
    assert all(isinstance(value, str) for value in environment.values())


def test_a_gpu_replica_is_bound_to_no_cores() -> None:
    environment = replica_environment(ServingSettings(), 0, verbose=True, gpu=True)

    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment
    assert "OMP_NUM_THREADS" not in environment
    assert environment["VLLM_LOGGING_LEVEL"] == "INFO"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_replicas", 0),
        ("dtype", "int8"),
        ("kv_cache_gib", 0),
        ("threads_per_replica", -1),
        ("max_num_seqs", 0),
        ("max_model_len", -1),
        ("request_timeout_s", float("nan")),
        ("weight_bucket_mib", 0),
        ("gpu_memory_utilization", 5.0),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_rule(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"data\.serving\.{option}={value!r} must be"):
        ServingSettings(**{option: value})


def make_replica(engine: Any = None) -> VLLMReplica:
    replica = VLLMReplica("some-model", ServingSettings(), max_model_len=10, rank=0, gpu=False)
    replica.engine = engine
    return replica


def span(start: int, end: int, version: str) -> Any:
    return SimpleNamespace(start=start, end=end, version=version)


def test_version_spans_become_one_version_per_token() -> None:
    replica = make_replica()
    replica.version = 4

    # Two tokens under version 3, then the update: the rest under 4.
    assert replica._versions_per_token([span(0, 2, "3"), span(2, 5, "4")], 5) == [3, 3, 4, 4, 4]
    assert replica._versions_per_token([span(0, 3, "3")], 5) == [3, 3, 3, 4, 4]
    assert replica._versions_per_token(None, 2) == [4, 4]
    assert replica._versions_per_token([span(0, 1, "default")], 1) == [-1]
    assert replica._versions_per_token([], 0) == []


class EngineDeadError(Exception):
    """vLLM's, when its core process is gone."""


class FakeEngine:
    """Answers one generation, and remembers how it was asked."""

    def __init__(self, prompt_logprobs: Any = None, **completion: Any) -> None:
        self.completion = SimpleNamespace(**{"weight_versions": None, **completion})
        self.prompt_logprobs = prompt_logprobs
        self.prompt: list[int] = []
        self.sampling: dict[str, Any] = {}
        self.can_clear_cache = True
        self.is_dead = False

    async def generate(self, prompt: dict[str, Any], sampling: dict[str, Any], request_id: str) -> AsyncIterator[Any]:
        self.prompt, self.sampling = prompt["prompt_token_ids"], sampling
        if self.is_dead:
            raise EngineDeadError
        yield SimpleNamespace(outputs=[self.completion], prompt_logprobs=self.prompt_logprobs)

    async def finish_weight_update(self, weight_version: str) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        return self.can_clear_cache

    async def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        return [{"bytes_received": {"a": 8}, "checksum": "x"}, {"bytes_received": {"a": 8}, "checksum": "y"}]


@pytest.fixture
def _stub_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for vLLM's parameter classes, whose import takes tens of seconds."""
    parameters = ModuleType("vllm.sampling_params")
    parameters.SamplingParams = dict  # type: ignore[attr-defined]
    parameters.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    exceptions = ModuleType("vllm.v1.engine.exceptions")
    exceptions.EngineDeadError = EngineDeadError  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.exceptions", exceptions)


@pytest.mark.usefixtures("_stub_vllm")
def test_a_generation_returns_the_log_probs_of_the_sampled_tokens() -> None:
    logprobs = [
        {7: SimpleNamespace(logprob=-0.5), 1: SimpleNamespace(logprob=-0.1)},
        {8: SimpleNamespace(logprob=-0.25)},
    ]
    engine = FakeEngine(token_ids=(7, 8), logprobs=logprobs, finish_reason="stop", weight_versions=[span(0, 2, "5")])

    output = asyncio.run(make_replica(engine).generate([1, 2], SamplingParams(max_tokens=3), "r"))

    assert (output.token_ids, output.logprobs) == ([7, 8], [-0.5, -0.25])
    assert (output.stop_reason, output.policy_versions) == ("stop", [5, 5])


@pytest.mark.usefixtures("_stub_vllm")
def test_an_aborted_generation_may_be_empty() -> None:
    engine = FakeEngine(token_ids=[], logprobs=None, finish_reason="abort")

    output = asyncio.run(make_replica(engine).generate([1], SamplingParams(), "r"))

    assert (output.token_ids, output.logprobs, output.stop_reason) == ([], [], "abort")


@pytest.mark.usefixtures("_stub_vllm")
def test_a_request_asks_for_sampled_log_probs_within_the_room_and_detokenizes_only_for_stop_strings() -> None:
    engine = FakeEngine(token_ids=[], logprobs=[], finish_reason="length")
    replica = make_replica(engine)

    asyncio.run(replica.generate([1] * 8, SamplingParams(temperature=0.7, max_tokens=5, seed=3), "r"))
    assert engine.sampling["max_tokens"] == 2
    assert engine.sampling["logprobs"] == 0
    assert (engine.sampling["temperature"], engine.sampling["seed"]) == (0.7, 3)
    assert engine.sampling["detokenize"] is False

    asyncio.run(replica.generate([1], SamplingParams(stop=["\n"], stop_token_ids=[4], ignore_eos=True), "r"))
    assert (engine.sampling["detokenize"], engine.sampling["stop"]) == (True, ["\n"])
    assert (engine.sampling["stop_token_ids"], engine.sampling["ignore_eos"]) == ([4], True)


@pytest.mark.usefixtures("_stub_vllm")
def test_a_prompt_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt has 10 tokens, but data.serving.max_model_len=10 leaves no room"):
        asyncio.run(make_replica().generate([1] * 10, SamplingParams(), "r"))


@pytest.mark.usefixtures("_stub_vllm")
def test_a_dead_engine_is_infrastructure_and_no_fault_of_the_request() -> None:
    engine = FakeEngine()
    engine.is_dead = True

    with pytest.raises(ConnectionError, match="engine of replica 0 has died"):
        asyncio.run(make_replica(engine).generate([1], SamplingParams(), "r"))


class FlatLogprobs:
    """vLLM's: nothing for the first position, then the position's own token and the most likely ones."""

    def __init__(self, *positions: list[tuple[int, float]]) -> None:
        flat = [entry for position in positions for entry in position]
        self.start_indices = [sum(map(len, positions[:i])) for i in range(len(positions))]
        self.token_ids = [token for token, _ in flat]
        self.logprobs = [logprob for _, logprob in flat]

    def __len__(self) -> int:
        return len(self.start_indices)


@pytest.mark.usefixtures("_stub_vllm")
def test_a_score_reads_the_log_probs_of_the_response_from_the_whole_sequence_as_a_prompt() -> None:
    table = FlatLogprobs(
        [], [(2, -9.0), (4, -0.1), (5, -3.0)], [(3, -2.0), (6, -0.2), (3, -2.0)], [(1, -0.5), (1, -0.5), (8, -4.0)]
    )
    engine = FakeEngine(prompt_logprobs=table)
    replica = make_replica(engine)
    replica.version = 3

    output = asyncio.run(replica.score([7, 2], [3, 1], "r", top_k=2))

    assert engine.prompt == [7, 2, 3, 1]
    assert output.logprobs == [-2.0, -0.5]
    assert (output.top_ids, output.top_logprobs) == ([[6, 3], [1, 8]], [[-0.2, -2.0], [-0.5, -4.0]])
    assert output.policy_version == 3
    assert (engine.sampling["prompt_logprobs"], engine.sampling["max_tokens"]) == (2, 1)
    # What is found in the prefix cache has no log-probs.
    assert engine.sampling["skip_reading_prefix_cache"] is True


@pytest.mark.usefixtures("_stub_vllm")
def test_a_scoring_request_that_was_cut_short_may_be_tried_again() -> None:
    for table in (None, FlatLogprobs([], [(2, -9.0)])):
        with pytest.raises(ConnectionError, match="Replica 0 ended a scoring request before"):
            asyncio.run(make_replica(FakeEngine(prompt_logprobs=table)).score([7], [2, 3], "r"))


@pytest.mark.usefixtures("_stub_vllm")
def test_what_vllm_cannot_score_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature=0.5\): vLLM scores given tokens at temperature 1 only"):
        asyncio.run(make_replica().score([1], [2], "r", 0.5))
    # The engine insists on sampling one token more.
    with pytest.raises(ValueError, match=r"4 \+ 6 tokens, but the engine takes 9"):
        asyncio.run(make_replica().score([1] * 4, [2] * 6, "r"))


def test_a_finished_update_reports_bytes_and_the_checksums_of_all_its_processes() -> None:
    replica = make_replica(FakeEngine())

    report = asyncio.run(replica.finish_weight_update(6))

    assert (report.version, report.bytes_received, report.checksum) == (6, {"a": 8}, "x-y")
    assert replica.version == 6


def test_a_prefix_cache_that_survives_an_update_is_an_error() -> None:
    engine = FakeEngine()
    engine.can_clear_cache = False
    replica = make_replica(engine)

    with pytest.raises(RuntimeError, match="could not clear its prefix cache after the update to version 6"):
        asyncio.run(replica.finish_weight_update(6))
    assert replica.version == -1
