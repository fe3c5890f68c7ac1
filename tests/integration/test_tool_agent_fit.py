"""A whole fit with the tool loop: tools shown, called, answered, and their tokens left out of the loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_fit import spread_reward, tiny_data, tiny_fit

from lit_rl.agents import AgentSettings, ToolAgentLoop
from lit_rl.agents.tool_parsers import FunctionCall, ParsedMessage
from lit_rl.metrics.trace import TraceSettings

pytestmark = pytest.mark.usefixtures("nothing_left")

CHATML_TOOLS = Path(__file__).parents[2] / "examples" / "chatml_tools.jinja"
CALCULATOR = "tools: [{class_name: lit_rl.tools.calculator.Calculator, config: {type: native, rate_limit: 2}}]"


class CallsOnce:
    """Finds a call in the first turn and none later: a random model writes none."""

    def __init__(self) -> None:
        self.num_turns = 0

    def parse_ids(self, ids: list[int], tokenizer: Any, schemas: Any, *, is_truncated: bool) -> ParsedMessage:
        self.num_turns += 1
        calls = [FunctionCall(name="calculator", arguments='{"expression": "6 * 7"}')] if self.num_turns == 1 else []
        return ParsedMessage("text", calls)


class CallingLoop(ToolAgentLoop):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.parser = CallsOnce()

    async def generate(self, prompt_ids, sampling):  # type: ignore[no-untyped-def]
        output = await super().generate(prompt_ids, sampling)
        if self.parser.num_turns == 0:
            # The first answer counts as complete, or it would use up the tokens of the second.
            output.token_ids, output.logprobs = output.token_ids[:4], output.logprobs[:4]
            output.policy_versions, output.stop_reason = output.policy_versions[:4], "stop"
        return output


def tool_data(tmp_path: Path, **changes: Any):
    (tmp_path / "tools.yaml").write_text(CALCULATOR)
    agents = AgentSettings(
        num_workers=1,
        default_agent_loop=f"{__name__}.CallingLoop",
        tool_config_path=str(tmp_path / "tools.yaml"),
        chat_template=str(CHATML_TOOLS),
    )
    return tiny_data(
        **{"agents": agents, "max_prompt_tokens": 200, "max_response_tokens": 60, "max_tokens_per_micro_batch": 600}
        | changes
    )


def test_a_fit_with_tools_learns_from_sampled_tokens_only(tmp_path: Path) -> None:
    run = tiny_fit(2, data=tool_data(tmp_path)).fit()

    assert [len(trajectories) for trajectories in run.iterations] == [8, 8]
    for trajectory in run.iterations[-1]:
        assert trajectory.error is None
        assert "calculator" in run.data.decode(trajectory.prompt_ids)
        answer = [i for i, mask in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if not mask]
        assert "<tool_response>\n42\n</tool_response>" in run.data.decode(answer)
        assert trajectory.loss_mask[-1] == 1
        assert trajectory.metrics["num_tool_calls"] == 1
        assert trajectory.num_turns == 4
        assert trajectory.reward == spread_reward(trajectory.text, "")
        assert "42" not in trajectory.text
    # The engine sampled the second turn after the tool's answer, and the trainer scores it in the same place.
    assert max(gap for _, gap in run.logger.column("rollout_corr/logprob_gap_max")) < 1e-4


def test_a_traced_fit_leaves_the_spans_of_its_conversations_in_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    data = tool_data(tmp_path)
    data.agents.trace = TraceSettings(with_text=True)
    tiny_fit(1, data=data, default_root_dir=str(tmp_path)).fit()

    lines = [line for file in (tmp_path / "traces").glob("*.jsonl") for line in file.read_text().splitlines()]
    spans = {span["context"]["span_id"]: span for span in map(json.loads, lines)}
    names = [span["name"] for span in spans.values()]
    assert {name: names.count(name) for name in set(names)} == {
        "trajectory": 8, "turn": 16, "generate": 16, "tool": 8, "reward": 8
    }  # fmt: skip
    parents = {(span["name"], spans[span["parent_id"]]["name"]) for span in spans.values() if span["parent_id"]}
    assert parents == {("turn", "trajectory"), ("generate", "turn"), ("tool", "turn"), ("reward", "trajectory")}
    tool = next(span for span in spans.values() if span["name"] == "tool")
    assert tool["attributes"]["output"] == "42"
    generate = next(span for span in spans.values() if span["name"] == "generate")
    assert generate["attributes"]["policy_version_max"] == 0
    assert "calculator" in generate["attributes"]["prompt_text"]


def test_rows_are_measured_with_the_tools_they_are_rolled_out_with(tmp_path: Path) -> None:  # O35
    with pytest.raises(ValueError, match="max_prompt_tokens=64 leaves none .* tool schemas included"):
        tiny_fit(1, data=tool_data(tmp_path, max_prompt_tokens=64)).fit()
