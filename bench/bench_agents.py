"""Time the agent-loop worker with a stub server: python bench/bench_agents.py.

One core for all of it: render the prompt, run the single-turn loop against a stub that answers at once with 96 ids,
apply the ending rules, decode with the tokenizer of the bundled SmolLM2. Nothing is scored.

Then 2,000 conversations at once on the inline backend, each with three calls of the calculator and a last answer: the
tool loop with parsing, tool sessions and the ids of later turns. Memory is what the process grows by meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from lit_rl.agents import AgentLoopManager, AgentLoopWorker, AgentSettings, TrajectoryRequest
from lit_rl.cluster import Runtime
from lit_rl.types import Prompt, SamplingParams, TokenOutput

NUM_TRAJECTORIES, GROUP_SIZE, NUM_TOKENS, REPEATS = 4096, 8, 96, 3
NUM_CONVERSATIONS, NUM_TOOL_TURNS = 2000, 3
CALL = 'I calculate.\n<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 34"}}</tool_call>'
CALCULATOR = "tools: [{class_name: lit_rl.tools.calculator.Calculator, config: {type: native}}]"
CHATML_TOOLS = Path(__file__).parents[1] / "examples" / "chatml_tools.jinja"


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


class CallingClient:
    """Calls the calculator in the first turns of each conversation, then ends it; a turn takes 10 ms."""

    def __init__(self, tokenizer: Any) -> None:
        end = [tokenizer.eos_token_id]
        self._call = tokenizer.encode(CALL, add_special_tokens=False) + end
        self._answer = tokenizer.encode("It is 408.", add_special_tokens=False) + end
        self._num_turns: dict[str, int] = {}

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        await asyncio.sleep(0.01)
        turn = self._num_turns[conversation_id] = self._num_turns.get(conversation_id, 0) + 1
        token_ids = list(self._call if turn <= NUM_TOOL_TURNS else self._answer)
        return TokenOutput(
            token_ids=token_ids,
            logprobs=[-1.0] * len(token_ids),
            stop_reason="stop",
            policy_versions=[1] * len(token_ids),
        )


def run() -> dict[str, float]:
    """Return trajectories per second, the best of a few repeats, and time and memory of many conversations."""
    from lit_rl.models.loading import resolve_model

    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return {
            "agent_loop_trajectories_per_s": asyncio.run(_trajectories_per_s(resolve_model("bundled/smollm2-135m"))),
            **_conversations(resolve_model("bundled/smollm2-135m")),
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


def _conversations(model_path: str) -> dict[str, float]:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder, Runtime("inline") as runtime:
        tools = Path(folder) / "tools.yaml"
        tools.write_text(CALCULATOR)
        settings = AgentSettings(
            num_workers=1,
            max_concurrent_trajectories=NUM_CONVERSATIONS,
            default_agent_loop="tool_agent",
            max_response_tokens=1024,
            tool_config_path=str(tools),
            chat_template=str(CHATML_TOOLS),
        )
        client = CallingClient(AutoTokenizer.from_pretrained(model_path))
        manager = AgentLoopManager(runtime, settings, client, model_path)
        requests = _requests(NUM_CONVERSATIONS)
        sampling = SamplingParams(max_tokens=1024)
        runtime.loop.run(manager.generate(requests[:8], sampling), timeout_s=60, what="the first conversations")
        with _PeakMemory() as memory:
            started = time.perf_counter()
            trajectories = runtime.loop.run(manager.generate(requests, sampling), timeout_s=300, what="conversations")
            seconds = time.perf_counter() - started
        runtime.loop.run(manager.stop(), timeout_s=30, what="the manager to stop")
    assert len(trajectories) == NUM_CONVERSATIONS
    for trajectory in trajectories:
        assert trajectory.error is None, trajectory.error
        assert trajectory.metrics["num_tool_calls"] == NUM_TOOL_TURNS
        assert trajectory.text.endswith("It is 408.")
    return {"conversations_2000_s": seconds, "conversations_2000_peak_mb": memory.growth_mb}


class _PeakMemory:
    """How much the process grew inside the block, at its largest."""

    growth_mb = 0.0

    def __enter__(self) -> _PeakMemory:
        self._process = psutil.Process()
        self._start = self._process.memory_info().rss
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.growth_mb = max(self.growth_mb, (self._process.memory_info().rss - self._start) / 2**20)
            if self._is_over.wait(0.02):
                return


def _requests(num_trajectories: int = NUM_TRAJECTORIES) -> list[TrajectoryRequest]:
    prompts = [
        Prompt(row_id=str(row), messages=[{"role": "user", "content": f"What is {row} + {row}?"}], data_source="stub")
        for row in range(num_trajectories // GROUP_SIZE)
    ]
    return [
        TrajectoryRequest(prompt=prompt, group_id=prompt.row_id, sample_index=sample, seed=sample)
        for prompt in prompts
        for sample in range(GROUP_SIZE)
    ]


if __name__ == "__main__":
    print(json.dumps(run()))
