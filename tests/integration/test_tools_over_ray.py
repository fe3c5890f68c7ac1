"""Tools in worker processes: limits that hold over all of them, and every tool closed at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_rl.agents import AgentLoopManager, AgentSettings, TrajectoryRequest
from lit_rl.agents.policy_text import PolicyText
from lit_rl.cluster import Runtime
from lit_rl.types import Prompt, SamplingParams, Trajectory

USER_MODULE = """
import asyncio, os, time
from lit_rl.agents import AgentLoop
from lit_rl.agents.response import Response
from lit_rl.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, ToolSession

class Slow(BaseTool):
    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "slow"}})

    def note(self, *words):
        with open(self.config["notes"], "a") as file:
            file.write(" ".join(map(str, words)) + "\\n")

    async def execute(self, instance_id, parameters, **kwargs):
        started = time.time()
        await asyncio.sleep(0.05)
        self.note("ran", os.getpid(), started, time.time())
        return ToolResponse(text="done"), 0.0, {}

    async def close(self):
        self.note("closed", os.getpid())

class CallingLoop(AgentLoop):
    async def run(self, prompt, sampling):
        async with ToolSession(self.tools) as session:
            result = await session.call("slow", "{}")
        empty = Response(token_ids=[], loss_mask=[], logprobs=[], policy_versions=[], stop_reason="stop")
        trajectory = self.build_trajectory(prompt, [1], empty)
        trajectory.text, trajectory.reward = result.text, 1.0
        return trajectory
"""
TOOLS = """
tools:
  - class_name: ray_tool_module.Slow
    config: {{type: native, rate_limit: 1, notes: {notes}}}
"""


def test_a_limit_holds_over_workers_and_tools_are_closed_in_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray_tool_module.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    notes = tmp_path / "notes"
    (tmp_path / "tools.yaml").write_text(TOOLS.format(notes=notes))
    settings = AgentSettings(
        num_workers=2,
        default_agent_loop="ray_tool_module.CallingLoop",
        tool_config_path=str(tmp_path / "tools.yaml"),
    )

    with Runtime("ray", num_cpus=2) as runtime:
        manager = AgentLoopManager(runtime, settings, None, text_of_nothing())  # type: ignore[arg-type]
        trajectories = runtime.loop.run(_roll_out(manager), timeout_s=120, what="the rollout")

    assert [trajectory.text for trajectory in trajectories] == ["done"] * 8
    lines = [line.split() for line in notes.read_text().splitlines()]
    runs = sorted(
        (float(start), float(end), pid) for kind, pid, *times in lines if kind == "ran" for start, end in [times]
    )
    assert len({pid for _, _, pid in runs}) == 2
    for (_, end, _), (start, _, _) in zip(runs, runs[1:], strict=False):
        assert start >= end
    assert {pid for kind, pid, *_ in lines if kind == "closed"} == {pid for _, _, pid in runs}


async def _roll_out(manager: AgentLoopManager) -> list[Trajectory]:
    requests = [
        TrajectoryRequest(
            prompt=Prompt(row_id=str(number), messages=[], data_source="test", prompt_ids=[1]), group_id="g"
        )
        for number in range(8)
    ]
    trajectories = await manager.generate(requests, SamplingParams())
    await manager.stop()
    return trajectories


def text_of_nothing() -> PolicyText:
    # Inside a function, so that Ray sends the class by value: workers cannot import this test.
    class NoTokenizer:
        eos_token_id = 2

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return ""

    return PolicyText(tokenizer=NoTokenizer(), chat_template=None, end_token_ids=frozenset({2}))
