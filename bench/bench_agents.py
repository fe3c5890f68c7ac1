"""Time the agent-loop worker with a stub server: python bench/bench_agents.py.

One core for all of it: render the prompt, run the single-turn loop against a stub that answers at once with 96 ids,
apply the ending rules, decode with the tokenizer of the bundled SmolLM2. Nothing is scored.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time

from lit_rl.agents import AgentLoopWorker, AgentSettings, TrajectoryRequest
from lit_rl.types import Prompt, SamplingParams, TokenOutput

NUM_TRAJECTORIES, GROUP_SIZE, NUM_TOKENS, REPEATS = 4096, 8, 96, 3


class StubClient:
    """Answers every request with a random sequence drawn in advance."""

    def __init__(self, vocabulary_size: int) -> None:
        rng = random.Random(0)
        self._outputs = [[rng.randrange(100, vocabulary_size) for _ in range(NUM_TOKENS)] for _ in range(64)]
        self._next = 0

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        await asyncio.sleep(0)
        self._next = (self._next + 1) % len(self._outputs)
        return TokenOutput(
            token_ids=list(self._outputs[self._next]),
            logprobs=[-1.0] * NUM_TOKENS,
            stop_reason="length",
            policy_versions=[1] * NUM_TOKENS,
        )


def run() -> dict[str, float]:
    """Return trajectories per second, the best of a few repeats."""
    from lit_rl.models.loading import resolve_model

    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return {
            "agent_loop_trajectories_per_s": asyncio.run(_trajectories_per_s(resolve_model("bundled/smollm2-135m")))
        }
    finally:
        os.sched_setaffinity(0, affinity)


async def _trajectories_per_s(model_path: str) -> float:
    worker = AgentLoopWorker(AgentSettings(), StubClient(40_000), model_path)
    requests = _requests()
    best = 0.0
    for _ in range(REPEATS):
        started, num_finished = time.perf_counter(), 0
        async for batch in worker.run(requests, SamplingParams(max_tokens=NUM_TOKENS)):
            num_finished += len(batch)
        best = max(best, num_finished / (time.perf_counter() - started))
    return best


def _requests() -> list[TrajectoryRequest]:
    prompts = [
        Prompt(row_id=str(row), messages=[{"role": "user", "content": f"What is {row} + {row}?"}], data_source="stub")
        for row in range(NUM_TRAJECTORIES // GROUP_SIZE)
    ]
    return [
        TrajectoryRequest(prompt=prompt, group_id=prompt.row_id, sample_index=sample, seed=sample)
        for prompt in prompts
        for sample in range(GROUP_SIZE)
    ]


if __name__ == "__main__":
    print(json.dumps(run()))
