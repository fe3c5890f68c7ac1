"""Calculator and GSM8K tool."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.tools import ToolContext, ToolSession
from lit_rl.tools.calculator import Calculator, evaluate
from lit_rl.tools.gsm8k_tool import Gsm8kTool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 2 ** 5", 224),
        ("7 // 2 - 7 % 4", 0),
        ("-2^2", -4),
        ("6 ÷ 4 × 2", 3.0),
        ("sqrt(16) + max(1, 2)", 6.0),
        ("2 * pi", 6.283185307179586),
    ],
)
def test_expressions(expression, value):
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "x",
        "__import__('os')",
        "(1).real",
        "'a'*9",
        "1 if 1 else 2",
        "",
        "(-1)**0.5",
        "round(1, ndigits=1)",
        "(" * 300,
    ],
)
def test_anything_else_is_refused(expression):
    with pytest.raises(ValueError, match=r"\S"):
        evaluate(expression)


@settings(deadline=None)  # a loaded machine is no failure
@given(st.text(alphabet="0123456789+-*/()%.^ epimaxsqrt,", max_size=30))
def test_no_expression_escapes_as_an_exception(expression):
    response, _, _ = asyncio.run(Calculator().execute("i", {"expression": expression}))
    assert response.text


def test_the_calculator_answers_errors_as_text():
    async def main():
        async with ToolSession({"calculator": Calculator()}) as session:
            good = await session.call("calculator", '{"expression": "0.1 + 0.2"}')
            bad = await session.call("calculator", '{"expression": "1/0"}')
        assert good.text == "0.3"
        assert "division by zero" in bad.text
        assert session.metrics["num_tool_errors"] == 1

    asyncio.run(main())


def test_the_gsm8k_tool_keeps_the_last_answer():
    async def main():
        tool = Gsm8kTool({"type": "native"})
        kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "#### 1,200"}}}
        async with ToolSession({tool.name: tool}, ToolContext(row_id="1"), kwargs) as session:
            answers = [
                await session.call(tool.name, {"answer": answer}) for answer in ("12", "it is $1200.", "#### 1200")
            ]
            rewards = await session.final_rewards()
        assert [answer.reward for answer in answers] == [-0.05, 0.0, -0.05]
        assert rewards == {tool.name: 1.0}
        assert tool._states == {}

    asyncio.run(main())


def test_the_gsm8k_tool_says_what_the_row_lacks():
    async def main():
        tool = Gsm8kTool({})
        async with ToolSession({tool.name: tool}) as session:
            return await session.call(tool.name, {"answer": "1"})

    assert "ground_truth" in asyncio.run(main()).text
