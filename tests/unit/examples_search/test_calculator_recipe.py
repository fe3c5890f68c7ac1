"""The second agentic recipe: word problems with a calculator, over the loop of the search recipe."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from lit_rl.rewards.functions import load_reward_function
from lit_rl.tools import ToolSession, load_all_tools

ROOT = Path(__file__).parents[3]

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="module")
def module():
    # By path: the search recipe has a module of the same name.
    path = ROOT / "examples/calculator/demonstrations.py"
    spec = importlib.util.spec_from_file_location("calculator_demonstrations", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calculator_gives_the_answers_of_the_demonstrations(module):
    rows = module.problems("train", 20)
    tools = load_all_tools(ROOT / "examples/calculator/tools.yaml", None)

    async def main():
        for index in range(len(rows)):
            shown = module.conversation(rows[index])["messages"]
            assert [message["role"] for message in shown] == ["system", "user", "assistant", "tool", "assistant"]
            call = shown[2]["tool_calls"][0]["function"]
            async with ToolSession(tools) as session:
                result = await session.call(call["name"], call["arguments"])
            assert result.text == shown[3]["content"] == rows[index].ground_truth
            assert shown[4]["content"] == f"<answer>{result.text}</answer>"

    asyncio.run(main())


def test_right_answers_and_the_form_are_paid(module):
    [prompt] = [module.problems("train", 1)[0]]
    function = load_reward_function(str(ROOT / "examples/calculator/reward.py"), {})
    shown = module.conversation(prompt)["messages"]

    def score(*messages):
        text = "".join(message["content"] for message in messages if message["role"] == "assistant")
        info = {**prompt.extra_info, "messages": list(messages)}
        return function.call(solution_str=text, ground_truth=prompt.ground_truth, extra_info=info)

    assert score(*shown[2:]) == {"score": 1.1, "acc": 1.0, "format": 1.0}
    wrong = {"role": "assistant", "content": "<answer>1</answer>"}
    assert score(*shown[2:4], wrong) == {"score": 0.1, "acc": 0.0, "format": 1.0}
    assert score(shown[4]) == {"score": 1.0, "acc": 1.0, "format": 0.0}
