"""Speed of the work around a tool call: parsing, calling, scoring. CPU, one core."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator

from lit_rl.agents.tool_parsers import get_tool_parser
from lit_rl.rewards.search_r1_em import compute_score
from lit_rl.tools import FunctionTool

# 200 characters with one call.
MESSAGE = (
    "I should look up the capital of the country before I answer the question.\n"
    '<tool_call>\n{"name": "search", "arguments": '
    '{"query_list": ["capital of France", "population of Paris"]}}\n</tool_call>'
)
MESSAGE = MESSAGE[:-12].ljust(200 - 12) + MESSAGE[-12:]
ANSWER = (
    "<think>The passage says that the tower stands in Paris, the capital of France.</think>\n"
    "<answer> The Eiffel Tower, in Paris </answer>"
)
GOLDEN = {"target": ["Eiffel Tower", "the Eiffel tower in Paris"]}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SECONDS = 0.5


def run() -> dict[str, float]:
    """Return parses and scores per second, and microseconds per function-tool call."""
    parser = get_tool_parser("hermes")
    assert len(MESSAGE) == 200
    assert len(parser.parse(MESSAGE).calls) == 1
    assert compute_score(ANSWER, GOLDEN) == 1.0
    any_core = asyncio.run(_call_us(FunctionTool(_add, "add", SCHEMA)))
    with _one_core():
        return {
            "hermes_parses_per_s": _per_second(lambda: parser.parse(MESSAGE)),
            "function_tool_async_us": asyncio.run(_call_us(FunctionTool(_add_async, "add", SCHEMA))),
            "function_tool_sync_us": asyncio.run(_call_us(FunctionTool(_add, "add", SCHEMA))),
            # With other cores idle the tool's thread wakes one of them up, and a virtual core takes its time.
            "function_tool_sync_any_core_us": any_core,
            "em_scores_per_s": _per_second(lambda: compute_score(ANSWER, GOLDEN)),
        }


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    """Keep this process, threads that it starts included, on one core."""
    allowed = os.sched_getaffinity(0)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {min(allowed)})
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), allowed)


def _add(a: int, b: int) -> str:
    return str(a + b)


async def _add_async(a: int, b: int) -> str:
    return str(a + b)


def _per_second(work: Callable[[], object]) -> float:
    """Best of three, so that other work on the machine does not count."""
    best = 0.0
    for _ in range(3):
        started, count = time.perf_counter(), 0
        while time.perf_counter() - started < SECONDS:
            for _ in range(100):
                work()
            count += 100
        best = max(best, count / (time.perf_counter() - started))
    return best


async def _call_us(tool: FunctionTool, num_calls: int = 3000) -> float:
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(num_calls):
            await tool.call({"a": 1, "b": 2})
        best = min(best, (time.perf_counter() - started) / num_calls * 1e6)
    return best


if __name__ == "__main__":
    for key, value in run().items():
        print(f"{key}: {value:,.1f}")
