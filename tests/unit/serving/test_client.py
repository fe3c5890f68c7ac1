from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lit_rl.cluster import Runtime, WorkerGroup
from lit_rl.serving.client import GenerationFailedError, LLMServerClient
from lit_rl.serving.load_balancer import LoadBalancer
from lit_rl.types import SamplingParams, ScoreOutput, TokenOutput


class FakeReplica:
    """Continues a sequence by counting up from its last id; every answer can be replaced by a script.

    A script has one entry per call: an exception to raise, ``"hang"``, or a number of tokens after which to abort.
    """

    def __init__(self, version: int, script: list[Any] | None = None) -> None:
        self.version = version
        self.script = script or []
        self.calls: list[tuple[list[int], SamplingParams, str]] = []

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        self.calls.append((prompt_ids, sampling, request_id))
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        if step == "hang":
            await asyncio.sleep(60)
        count = sampling.max_tokens if step is None else step
        ids = [prompt_ids[-1] + 1 + i for i in range(count)]
        return TokenOutput(
            token_ids=ids,
            logprobs=[-0.5 * i for i in ids],
            stop_reason="length" if step is None else "abort",
            policy_versions=[self.version] * count,
        )

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], request_id: str, temperature: float, top_k: int
    ) -> ScoreOutput:
        step = self.script.pop(0) if self.script else None
        if isinstance(step, Exception):
            raise step
        if step == "hang":
            await asyncio.sleep(60)
        return ScoreOutput(logprobs=[-temperature * i for i in response_ids], policy_version=self.version)

    async def get_calls(self) -> list[tuple[list[int], SamplingParams, str]]:
        return self.calls


def serve(
    scripts: list[list[Any]], use: Callable[[LLMServerClient, WorkerGroup, Any], Awaitable[None]], **options: Any
) -> None:
    """Run ``use(client, replicas, balancer)`` against inline replicas, one per script."""
    runtime = Runtime("inline")
    try:
        per_rank = [{"version": 10 + rank, "script": script} for rank, script in enumerate(scripts)]
        replicas = WorkerGroup.create(runtime, FakeReplica, len(scripts), name="replica", per_rank_kwargs=per_rank)
        servers = {replica.name: replica for replica in replicas.workers}
        balancer = WorkerGroup.create(runtime, LoadBalancer, 1, name="balancer", kwargs={"servers": servers}).workers[0]

        async def run() -> None:
            client = LLMServerClient(balancer, servers, **{"pause_s": 0.001, **options})
            await use(client, replicas, balancer)
            async with asyncio.timeout(20):  # releases travel with a delay of a few milliseconds
                while await balancer.call("get_total_inflight", timeout_s=5) > 0:
                    await asyncio.sleep(0.005)

        runtime.loop.run(run(), timeout_s=30.0, what="the test")
    finally:
        runtime.stop()


def test_a_request_returns_what_the_replica_sampled() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        output = await client.generate([1, 2], SamplingParams(max_tokens=3), "c")

        assert output.token_ids == [3, 4, 5]
        assert output.logprobs == [-1.5, -2.0, -2.5]
        assert output.policy_versions == [10, 10, 10]
        assert output.stop_reason == "length"

    serve([[]], use)


def test_turns_of_a_conversation_share_a_replica_under_fresh_request_ids() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        for conversation in ("a", "b", "a", "a"):
            await client.generate([1], SamplingParams(max_tokens=1), conversation)

        calls = [await replica.call("get_calls", timeout_s=5) for replica in replicas.workers]
        assert [len(of_replica) for of_replica in calls] == [3, 1]
        assert len({request_id for of_replica in calls for _, _, request_id in of_replica}) == 4

    serve([[], []], use)


def test_an_aborted_request_goes_on_with_its_tokens_and_what_is_left_of_the_budget() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        sampling = SamplingParams(max_tokens=6, seed=7)
        output = await client.generate([1], sampling, "c")

        assert output.token_ids == [2, 3, 4, 5, 6, 7]
        assert output.logprobs == [-1.0, -1.5, -2.0, -2.5, -3.0, -3.5]
        assert output.stop_reason == "length"
        calls = await replicas.workers[0].call("get_calls", timeout_s=5)
        assert [prompt for prompt, _, _ in calls] == [[1], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4]]
        assert [given.max_tokens for _, given, _ in calls] == [6, 4, 4, 3]
        assert [given.seed for _, given, _ in calls] == [7, 9, 9, 10]
        assert (sampling.max_tokens, sampling.seed) == (6, 7)  # the caller's object is left alone
        assert client.counters.resumes == 3

    serve([[2, 0, 1]], use)


def test_an_abort_that_has_used_up_the_budget_ends_with_length() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        output = await client.generate([1], SamplingParams(max_tokens=2), "c")

        assert (output.token_ids, output.stop_reason) == ([2, 3], "length")

    serve([[2]], use)


def test_a_failing_replica_is_left_with_the_tokens_so_far() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        output = await client.generate([1], SamplingParams(max_tokens=4), "c")

        assert output.token_ids == [2, 3, 4, 5]
        assert output.policy_versions == [10, 10, 11, 11]
        assert (client.counters.retries, client.counters.failovers, client.counters.resumes) == (1, 1, 1)

    serve([[2, ConnectionError("engine is gone")], []], use)


def test_a_hanging_replica_is_left_after_the_timeout() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        assert (await client.generate([1], SamplingParams(max_tokens=1), "c")).policy_versions == [11]

    serve([["hang"], []], use, request_timeout_s=0.05)


def test_a_dead_replica_is_ejected_and_its_requests_complete_elsewhere() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        await replicas.workers[0].stop(1.0)
        requests = (client.generate([1], SamplingParams(max_tokens=2), f"c{i}") for i in range(8))
        outputs = await asyncio.gather(*requests)

        assert all(output.policy_versions == [11, 11] for output in outputs)
        status = await balancer.call("get_status", timeout_s=5)
        assert status["ejected_servers"] == ["replica-0"]
        assert client.counters.failovers == 4

    serve([[], []], use)


def test_a_request_the_replica_refuses_is_not_retried() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        with pytest.raises(ValueError, match="prompt is too long"):
            await client.generate([1], SamplingParams(), "c")
        assert client.counters.retries == 0

    serve([[ValueError("prompt is too long")], []], use)


def test_attempts_that_all_fail_raise_the_last_failure() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        with pytest.raises(GenerationFailedError, match="2 attempts failed, on replicas replica-0, replica-0.*second"):
            await client.generate([1], SamplingParams(), "c")

    serve([[ConnectionError("first"), ConnectionError("second")]], use, max_attempts=2)


def test_waiting_for_a_replica_ends_at_the_deadline() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        await balancer.call("remove_servers", ["replica-0"], timeout_s=5)
        with pytest.raises(GenerationFailedError, match=r"no response within 0.05 s, because no replica was available"):
            await client.generate([1], SamplingParams(), "c")
        assert client.counters.waits > 1

    serve([[]], use, deadline_s=0.05)


def test_aborts_without_end_stop_at_the_deadline() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        with pytest.raises(GenerationFailedError, match="kept aborting"):
            await client.generate([1], SamplingParams(), "c")

    serve([[0] * 1000], use, deadline_s=0.05)


@pytest.mark.parametrize("failure", [ConnectionError("engine is gone"), "hang"])
def test_given_tokens_are_scored_by_another_replica_where_the_first_fails(failure: Any) -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        output = await client.score([1], [2, 3], "c", temperature=0.5)

        assert (output.logprobs, output.policy_version) == ([-1.0, -1.5], 11)
        assert (client.counters.retries, client.counters.failovers) == (1, 1)

    serve([[failure], []], use, request_timeout_s=0.2)


def test_a_score_that_the_replica_refuses_is_not_retried_and_one_that_always_fails_ends() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        with pytest.raises(ValueError, match="too long"):
            await client.score([1], [2], "c")
        with pytest.raises(GenerationFailedError, match="2 attempts failed.*second"):
            await client.score([1], [2], "c")

    serve([[ValueError("too long"), ConnectionError("first"), ConnectionError("second")]], use, max_attempts=2)


def test_a_replica_added_later_is_found_through_the_balancer() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        await balancer.call("remove_servers", ["replica-0"], timeout_s=5)
        await balancer.call("add_servers", {"late": replicas.workers[1]}, timeout_s=5)
        await balancer.call("remove_servers", ["replica-1"], timeout_s=5)

        assert (await client.generate([1], SamplingParams(max_tokens=1), "c")).policy_versions == [11]

    serve([[], []], use)


def test_a_cancelled_request_gives_its_place_back() -> None:
    async def use(client: LLMServerClient, replicas: WorkerGroup, balancer: Any) -> None:
        waiting = asyncio.create_task(client.generate([1], SamplingParams(), "c"))
        at_once = asyncio.create_task(client.generate([1], SamplingParams(), "d"))
        await asyncio.sleep(0)
        at_once.cancel()
        await asyncio.sleep(0.05)
        assert await balancer.call("get_total_inflight", timeout_s=5) == 1
        waiting.cancel()
        await asyncio.gather(waiting, at_once, return_exceptions=True)
        # `serve` checks that nothing is in flight.

    serve([["hang"], ["hang"]], use)


def test_requests_of_one_tick_travel_in_one_exchange() -> None:
    exchanges = []

    class Recorder(LoadBalancer):
        async def exchange(self, owner: str, released: Any, requests: Any) -> list[str | None]:
            exchanges.append((len(released), len(requests)))
            return await super().exchange(owner, released, requests)

    runtime = Runtime("inline")
    balancer = WorkerGroup.create(runtime, Recorder, 1, name="balancer", kwargs={"servers": ["A"]}).workers[0]

    async def run() -> None:
        client = LLMServerClient(balancer, {})
        servers = await asyncio.gather(*(client.acquire(str(i)) for i in range(50)))
        for server_id in servers:
            client.release(server_id or "")
        await client.acquire("next")

    runtime.loop.run(run(), timeout_s=10.0, what="the test")
    runtime.stop()

    assert exchanges == [(0, 50), (50, 1)]


def test_a_pickled_client_starts_afresh() -> None:
    client = LLMServerClient(None, {}, request_timeout_s=5.0)  # type: ignore[arg-type]
    client.counters.requests = 3

    copy = pickle.loads(pickle.dumps(client))

    assert copy.counters.requests == 0
    assert copy._deadline_s == 15.0


def test_attempts_below_one_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_attempts=0"):
        LLMServerClient(None, {}, max_attempts=0)  # type: ignore[arg-type]
