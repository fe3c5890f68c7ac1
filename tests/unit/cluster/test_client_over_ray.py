from __future__ import annotations

import asyncio
import os
from typing import Any

from lit_rl.cluster import Runtime, WorkerGroup
from lit_rl.serving.client import LLMServerClient
from lit_rl.serving.load_balancer import LoadBalancer
from lit_rl.types import SamplingParams, TokenOutput


class CountingReplica:
    """Samples 1, 2, 3, ...; version 0 never finishes."""

    def __init__(self, version: int) -> None:
        self.version = version

    async def get_pid(self) -> int:
        return os.getpid()

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        await asyncio.sleep(60.0 if self.version == 0 else 0.0)
        ids = list(range(1, sampling.max_tokens + 1))
        return TokenOutput(
            token_ids=ids, logprobs=[-1.0] * len(ids), stop_reason="stop", policy_versions=[self.version] * len(ids)
        )


class Caller:
    """Stands for an agent worker: gets a client by pickle and uses it on its own loop."""

    def __init__(self, client: LLMServerClient) -> None:
        self.client = client

    async def generate_many(self, count: int) -> list[TokenOutput]:
        sampling = SamplingParams(max_tokens=2)
        return await asyncio.gather(*(self.client.generate([5], sampling, f"c{i}") for i in range(count)))

    async def get_failovers(self) -> int:
        return self.client.counters.failovers


async def _until(condition: Any) -> None:
    async with asyncio.timeout(20.0):
        while not await condition():
            await asyncio.sleep(0.02)


def test_requests_of_a_killed_replica_complete_elsewhere(ray_runtime: Runtime) -> None:
    # Acceptance A10, with the client in a worker of its own.
    per_rank = [{"version": 0}, {"version": 1}]
    replicas = WorkerGroup.create(ray_runtime, CountingReplica, 2, name="replica", per_rank_kwargs=per_rank)
    servers = {replica.name: replica for replica in replicas.workers}
    balancers = WorkerGroup.create(ray_runtime, LoadBalancer, 1, name="balancer", kwargs={"servers": list(servers)})
    balancer = balancers.workers[0]
    client = LLMServerClient(balancer, servers)
    callers = WorkerGroup.create(ray_runtime, Caller, 1, name="caller", kwargs={"client": client})

    async def run() -> tuple[list[TokenOutput], int, dict[str, Any]]:
        await asyncio.gather(*(group.ready(60.0) for group in (replicas, balancers, callers)))
        victim = await replicas.workers[0].call("get_pid", timeout_s=10.0)
        task = asyncio.create_task(callers.workers[0].call("generate_many", 8, timeout_s=60.0))

        async def is_busy() -> bool:
            return bool(await balancer.call("get_inflight_count", "replica-0", timeout_s=10.0) == 4)

        async def is_idle() -> bool:
            return bool(await balancer.call("get_total_inflight", timeout_s=10.0) == 0)

        await _until(is_busy)
        os.kill(victim, 9)
        outputs = await task
        await _until(is_idle)
        failovers = await callers.workers[0].call("get_failovers", timeout_s=10.0)
        return outputs, failovers, await balancer.call("get_status", timeout_s=10.0)

    outputs, failovers, status = ray_runtime.loop.run(run(), timeout_s=120.0, what="the test")

    assert [output.token_ids for output in outputs] == [[1, 2]] * 8
    assert all(output.policy_versions == [1, 1] for output in outputs)
    assert failovers == 4
    assert status["ejected_servers"] == ["replica-0"]
    for group in (replicas, balancers, callers):
        ray_runtime.loop.run(group.stop(2.0), timeout_s=30.0, what="a group to stop")


def test_a_killed_balancer_starts_again_and_no_request_is_lost(ray_runtime: Runtime) -> None:
    replicas = WorkerGroup.create(ray_runtime, CountingReplica, 1, name="counting", kwargs={"version": 1})
    servers = {replica.name: replica for replica in replicas.workers}
    balancers = WorkerGroup.create(
        ray_runtime, LoadBalancer, 1, name="mortal_balancer", kwargs={"servers": list(servers)}, restarts=True
    )
    client = LLMServerClient(balancers.workers[0], servers)

    async def run() -> list[TokenOutput]:
        await asyncio.gather(*(group.ready(60.0) for group in (replicas, balancers)))
        sampling = SamplingParams(max_tokens=2)
        outputs = [await client.generate([5], sampling, "before")]
        identity = await balancers.workers[0]._identity  # type: ignore[attr-defined]
        os.kill(identity.pid, 9)
        outputs += await asyncio.gather(*(client.generate([5], sampling, f"after{i}") for i in range(4)))
        return outputs

    outputs = ray_runtime.loop.run(run(), timeout_s=120.0, what="the test")

    assert [output.token_ids for output in outputs] == [[1, 2]] * 5
    for group in (replicas, balancers):
        ray_runtime.loop.run(group.stop(2.0), timeout_s=30.0, what="a group to stop")
