"""The examples do what their pages say, part by part; tests/integration/test_examples_fit.py runs them in a fit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lit_rl.agents import AgentSettings
from lit_rl.agents.loop_classes import find_loop_class
from lit_rl.data.chat_template import ChatTemplate
from lit_rl.models.loading import load_tokenizer
from lit_rl.rewards.functions import load_reward_function
from lit_rl.tools import ToolContext, ToolSession, load_all_tools
from lit_rl.types import Prompt, SamplingParams, TokenOutput

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCS = Path(__file__).parents[2] / "docs"


def test_the_tools_answer_and_the_class_tool_keeps_its_state() -> None:
    async def main() -> None:
        tools = load_all_tools(EXAMPLES / "own_tools.yaml", EXAMPLES / "own_tools.py")
        assert list(tools) == ["calculator", "hint", "add", "digits"]
        kwargs = {"hint": {"create_kwargs": {"hints": ["only one"]}}}
        async with ToolSession(tools, ToolContext(row_id="1"), kwargs) as session:
            assert (await session.call("add", '{"a": 2, "b": 40}')).text == "42"
            assert (await session.call("digits", '{"number": -123}')).text == "-123 has 3 digits"
            first, second = [await session.call("hint", "{}") for _ in range(2)]
        assert (first.text, first.reward, second.text) == ("only one", -0.05, "No more hints.")
        assert session.metrics["tool/hint/hints_given"] == 1
        assert tools["hint"].hints == {}  # type: ignore[union-attr]

    asyncio.run(main())


def test_the_reward_falls_with_the_distance() -> None:
    function = load_reward_function(str(EXAMPLES / "own_reward.py"), {"tolerance": 20})
    score = lambda text: function.call(data_source="d", solution_str=text, ground_truth="40", **function.kwargs)  # noqa: E731
    assert score("It is 40.") == {"score": 1.0, "has_number": 1.0, "acc": 1.0}
    assert score("45")["score"] == 0.75
    assert score("100")["score"] == 0.0
    assert score("no idea") == {"score": 0.0, "has_number": 0.0}


def test_the_agent_loop_asks_for_a_second_answer() -> None:
    tokenizer = load_tokenizer("bundled/tiny-random")
    end = tokenizer.eos_token_id
    seeds = []

    class Client:
        async def generate(self, prompt_ids, sampling, conversation_id):
            seeds.append(sampling.seed)
            ids = [*tokenizer.encode("7"), end]
            return TokenOutput(token_ids=ids, logprobs=[-1.0, -1.0], stop_reason="stop", policy_versions=[0, 0])

    loop_class = find_loop_class(f"{EXAMPLES}/own_agent_loop.py:SelfCheckAgentLoop", AgentSettings()).cls
    loop = loop_class(
        client=Client(),
        chat_template=ChatTemplate(tokenizer),
        tokenizer=tokenizer,
        max_response_tokens=64,
        end_token_ids=frozenset({end}),
    )
    prompt = Prompt(row_id="1", messages=[{"role": "user", "content": "3 + 4?"}], data_source="d")
    trajectory = asyncio.run(loop.run(prompt, SamplingParams(max_tokens=64, seed=5)))
    trajectory.check()
    assert tokenizer.decode(trajectory.response_ids) == (
        "7<|im_end|>\n<|im_start|>user\nAre you sure? Give the final answer.<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>"
    )
    assert [trajectory.loss_mask[0], trajectory.loss_mask[2], trajectory.loss_mask[-1]] == [1, 0, 1]
    assert sum(trajectory.loss_mask) == 4
    assert trajectory.num_turns == 4
    assert seeds == [5, 6]


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="Cannot import agent loop '/no/loop.py:Loop': there is no file /no/loop.py"):
        find_loop_class("/no/loop.py:Loop", AgentSettings())


@pytest.mark.parametrize("page", ["tools.md", "agent_loops.md", "rewards.md", "data.md"])
def test_pages_of_extension_points_fit_on_a_screen_and_link_to_what_exists(page: str) -> None:
    text = (DOCS / page).read_text()
    assert len(text.splitlines()) <= 60
    for link in text.split("](")[1:]:
        assert (DOCS / link.partition(")")[0]).exists()


def test_the_source_on_the_page_of_rows_is_one() -> None:
    code = (DOCS / "data.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"Prompt": Prompt}
    exec(code, names)
    source = names["Squares"](num_rows=3)
    assert (len(source), source[2].ground_truth, source[2].row_id) == (3, "4", "squares/2")
