"""Acquire-and-release pairs per second through the client, over Ray, with 256 conversations in flight.

Run: python bench/bench_balancer.py
"""

from __future__ import annotations

import asyncio
import time

from lit_rl.cluster import Runtime, WorkerGroup
from lit_rl.serving.client import LLMServerClient
from lit_rl.serving.load_balancer import LoadBalancer

NUM_INFLIGHT = 256
NUM_PAIRS = 40_000


async def measure(group: WorkerGroup) -> float:
    await group.ready(60.0)
    client = LLMServerClient(group.workers[0], {})

    async def conversation(index: int, num_turns: int) -> None:
        for _ in range(num_turns):
            server_id = await client.acquire(str(index))
            assert server_id is not None
            client.release(server_id)

    async def all_conversations(num_turns: int) -> float:
        start = time.perf_counter()
        await asyncio.gather(*(conversation(index, num_turns) for index in range(NUM_INFLIGHT)))
        return time.perf_counter() - start

    await all_conversations(10)  # connections and caches
    num_turns = NUM_PAIRS // NUM_INFLIGHT
    return num_turns * NUM_INFLIGHT / await all_conversations(num_turns)


def run() -> dict[str, float]:
    """Return ``balancer_pairs_per_s``."""
    with Runtime("ray", num_cpus=2) as runtime:
        servers = [f"replica-{i}" for i in range(8)]
        group = WorkerGroup.create(runtime, LoadBalancer, 1, name="balancer", kwargs={"servers": servers})
        rate = runtime.loop.run(measure(group), timeout_s=120.0, what="the balancer to answer")
    return {"balancer_pairs_per_s": rate}


if __name__ == "__main__":
    print(run())
