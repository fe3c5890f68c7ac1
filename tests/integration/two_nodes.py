"""Run by test_two_nodes.py in a process of its own: workers over the nodes of a cluster, and a node that is lost.

Prints one JSON object: node of each worker (0 or 1) before and after the loss, and what the rollout across it gave.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from lit_rl.agents import AgentLoopManager, AgentSettings, TrajectoryRequest
from lit_rl.agents.policy_text import PolicyText
from lit_rl.cluster import Runtime, WorkerGroup
from lit_rl.types import Prompt, SamplingParams, TokenOutput

NUM_TRAJECTORIES = 8


class NodeOf:
    """Says where it runs."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


class NodeClient:
    """Answers slowly, and notes where it was asked."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        with self.notes.open("a") as file:
            file.write(f"{ray.get_runtime_context().get_node_id()}\n")
        await asyncio.sleep(3.0)
        return TokenOutput(token_ids=prompt_ids, logprobs=[-1.0], stop_reason="stop", policy_versions=[0])


class NumberTokenizer:
    """Its tokens are numbers."""

    eos_token_id = 2

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return str(token_ids[0])


async def nodes_of(runtime: Runtime, name: str, spread: bool) -> list[str]:
    """Node of each of four workers."""
    group = WorkerGroup.create(runtime, NodeOf, 4, name=name, spread=spread)
    await group.ready(120)
    nodes = [await worker.call("node", timeout_s=30) for worker in group.workers]
    await group.stop(10)
    return nodes


async def until_noticed(num_nodes: int) -> None:
    """Wait until Ray counts so many living nodes: it goes on placing workers on a lost one for some seconds."""
    while sum(node["Alive"] for node in ray.nodes()) != num_nodes:  # the caller bounds the wait
        await asyncio.sleep(0.2)


async def roll_out(runtime: Runtime, notes: Path, lose_node: Any) -> list[str]:
    """Texts of a rollout during which a node is lost."""
    text = PolicyText(tokenizer=NumberTokenizer(), chat_template=None, end_token_ids=frozenset({2}))
    manager = AgentLoopManager(runtime, AgentSettings(num_workers=2), NodeClient(notes), text)
    await manager.start()
    requests = [
        TrajectoryRequest(prompt=Prompt(row_id=str(n), messages=[], data_source="d", prompt_ids=[n]), group_id="g")
        for n in range(NUM_TRAJECTORIES)
    ]
    rollout = asyncio.create_task(manager.generate(requests, SamplingParams()))
    while not notes.exists() or len(notes.read_text().splitlines()) < NUM_TRAJECTORIES:  # the test bounds the whole
        await asyncio.sleep(0.1)
    await asyncio.to_thread(lose_node)
    trajectories = await rollout
    await manager.stop()
    return [trajectory.error or trajectory.text for trajectory in trajectories]


def main() -> None:
    """Start two nodes, spread, lose one, spread again."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    notes = Path(sys.argv[1])
    try:
        with Runtime("ray", address=cluster.address) as runtime:
            # Only now, so that this process belongs to the first one: workers end with the node of their driver.
            second = cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            own = ray.get_runtime_context().get_node_id()
            both = runtime.loop.run(nodes_of(runtime, "both", True), timeout_s=200, what="four workers")
            texts = runtime.loop.run(
                roll_out(runtime, notes, lambda: cluster.remove_node(second, allow_graceful=False)),
                timeout_s=200,
                what="the rollout",
            )
            runtime.loop.run(until_noticed(1), timeout_s=120, what="Ray to notice the lost node")
            alone = runtime.loop.run(nodes_of(runtime, "alone", True), timeout_s=200, what="four workers")
        asked = notes.read_text().split()
        result = {
            "both": [int(node != own) for node in both],
            "alone": [int(node != own) for node in alone],
            "asked": [sum(node == own for node in asked[:8]), sum(node != own for node in asked[:8])],
            "asked_again_here": all(node == own for node in asked[8:]) and len(asked) > 8,
            "texts": texts,
        }
        print(json.dumps(result))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
