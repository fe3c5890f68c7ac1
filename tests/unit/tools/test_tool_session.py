"""Calls that are answered whatever happens, and the life cycle of class tools."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.tools import BaseTool, FunctionTool, OpenAIFunctionToolSchema, ToolContext, ToolResponse, ToolSession
from lit_rl.tools.registry import load_all_tools

FIXTURES = Path(__file__).parent / "fixtures"


def schema(name, **properties):
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }


SEARCH = FunctionTool(lambda query: f"found {query}", "search", schema("search", query={"type": "string"}))


class Recorder(BaseTool):
    def __init__(self, config=None, **hooks):
        super().__init__(config, OpenAIFunctionToolSchema.model_validate(schema("rec")))
        self.events, self.hooks = [], hooks

    async def _hook(self, event, value=None):
        self.events.append(event if value is None else (event, value))
        if event in self.hooks:
            await self.hooks[event]()

    async def create(self, instance_id=None, **kwargs):
        await self._hook("create", kwargs or None)
        return "mine", ToolResponse()

    async def execute(self, instance_id, parameters, agent_data, **kwargs):
        assert instance_id == "mine"
        await self._hook("execute", kwargs or None)
        return ToolResponse(text=f"turn {agent_data.turn}"), 0.5, {"n": 2, "word": "x"}

    async def calc_reward(self, instance_id, **kwargs):
        await self._hook("calc_reward", kwargs or None)
        return 1.5

    async def release(self, instance_id, **kwargs):
        await self._hook("release", kwargs or None)


async def raise_value_error():
    raise ValueError("no " + "x" * 1000)


async def hang():
    await asyncio.sleep(60)


def run_calls(tools, *calls, **options):
    async def main():
        async with ToolSession({tool.name: tool for tool in tools}, **options) as session:
            results = await asyncio.gather(*(session.call(name, arguments) for name, arguments in calls))
        return results, session.metrics

    return asyncio.run(main())


def test_unknown_tools_are_answered_with_the_names_there_are():  # O05
    (result,), metrics = run_calls([SEARCH], ("serch", "{}"))
    assert "serch" in result.text
    assert "search" in result.text
    assert result.is_invalid
    assert metrics["num_invalid_calls"] == 1


def test_arguments_as_a_json_string_are_decoded():  # O04
    (result,), _ = run_calls([SEARCH], ("search", json.dumps('{"query":"x"}')))
    assert result.text == "found x"


@pytest.mark.parametrize(
    "arguments",
    [
        '["x"]',
        "null",
        "",
        None,
        '{"query": NaN}',
        '{"query": 3}',
        "{}",
        '{"query": "x"',
        '{"query":"x","y":1}',
        "[" * 5000,
    ],
)
def test_wrong_arguments_are_explained_and_counted(arguments):  # O04
    (result,), metrics = run_calls([SEARCH], ("search", arguments))
    assert result.status == "invalid_arguments"
    assert "search" in result.text
    assert len(result.text) < 600
    assert metrics["num_invalid_calls"] == 1


def test_nested_schemas_and_nullable_parameters_are_checked():
    nested = schema(
        "n",
        where={"type": "object", "properties": {"year": {"type": "integer"}}},
        top={"type": "integer", "nullable": True},
    )
    tool = FunctionTool(lambda where, top: "ok", "n", nested)
    (good, bad), _ = run_calls(
        [tool], ("n", '{"where": {"year": 3}, "top": null}'), ("n", '{"where": {"year": "x"}, "top": 1}')
    )
    assert good.text == "ok"
    assert "where.year" in bad.text


def test_raising_and_hanging_tools_leave_the_others_alone():  # O08
    cleaned = []

    async def hanging():
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    def divide():
        return 1 / 0

    tools = [
        FunctionTool(f, n, schema(n)) for f, n in ((divide, "divide"), (hanging, "hanging"), (lambda: "ok", "fine"))
    ]
    started = time.monotonic()
    results, metrics = run_calls(
        tools, ("divide", "{}"), ("hanging", "{}"), ("fine", "{}"), ("fine", "{}"), timeout_s=0.2
    )

    assert time.monotonic() - started < 1.0
    assert [result.status for result in results] == ["error", "timeout", "ok", "ok"]
    assert "ZeroDivisionError" in results[0].text
    assert cleaned == [True]
    assert (metrics["num_tool_errors"], metrics["num_tool_timeouts"], metrics["num_tool_calls"]) == (1, 1, 4)


def test_a_tool_that_ignores_its_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr("lit_rl.tools.session.CANCEL_GRACE_S", 0.05)

    async def stubborn():
        for _ in range(3):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)

    (result,), _ = run_calls([FunctionTool(stubborn, "s", schema("s"))], ("s", "{}"), timeout_s=0.05)
    assert result.status == "timeout"


def test_a_class_tool_lives_over_the_trajectory_and_gets_all_kwargs():
    tool = Recorder()

    async def main():
        kwargs = {"rec": {f"{group}_kwargs": {"a": group} for group in ("create", "execute", "calc_reward", "release")}}
        context = ToolContext(row_id="7", turn=4)
        async with ToolSession({"rec": tool}, context, kwargs) as session:
            first, second = await asyncio.gather(session.call("rec", "{}"), session.call("rec", {}))
            rewards = await session.final_rewards()
        return first, second, rewards, session.metrics

    first, second, rewards, metrics = asyncio.run(main())
    assert [event[0] for event in tool.events] == ["create", "execute", "execute", "calc_reward", "release"]
    for event, kwargs in tool.events:
        assert kwargs == {"a": event, f"{event}_kwargs": {"a": event}}
    assert (first.text, second.reward, rewards) == ("turn 4", 0.5, {"rec": 1.5})
    assert metrics["tool/rec/n"] == 4


@pytest.mark.parametrize("event", ["create", "execute", "release"])
@pytest.mark.parametrize("hook", [raise_value_error, hang])
def test_release_happens_once_whatever_fails(event, hook):
    tool = Recorder(config={"timeout_s": 0.05}, **{event: hook})
    (result, again), metrics = run_calls([tool], ("rec", {}), ("rec", {}))
    assert tool.events.count("create") == tool.events.count("release") == 1
    assert result.status == ("ok" if event == "release" else "error" if hook is raise_value_error else "timeout")
    assert len(result.text) < 400
    assert again.status == result.status


def test_release_happens_when_the_trajectory_is_cancelled():
    tool = Recorder(execute=hang)

    async def main():
        async def trajectory():
            async with ToolSession({"rec": tool}) as session:
                await session.call("rec", {})

        task = asyncio.ensure_future(trajectory())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert tool.events == ["create", "execute", "release"]


def test_a_failing_calc_reward_is_not_zero():
    tool = Recorder(calc_reward=raise_value_error)

    async def main():
        async with ToolSession({"rec": tool}) as session:
            await session.call("rec", {})
            await session.final_rewards()

    with pytest.raises(RuntimeError, match="calc_reward failed"):
        asyncio.run(main())
    assert tool.events[-1] == "release"


def test_max_concurrency_holds_over_sessions():
    running, most = 0, 0

    async def work():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    tool = FunctionTool(work, "w", schema("w"), max_concurrency=2)

    async def main():
        async def trajectory():
            async with ToolSession({"w": tool}) as session:
                return await session.call("w", "{}")

        return await asyncio.gather(*(trajectory() for _ in range(7)))

    assert all(result.status == "ok" for result in asyncio.run(main()))
    assert most == 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ([1], "list"),
        ({"gone": {}}, "'gone'"),
        ({"rec": 3}, r"\['rec'\]"),
        ({"rec": {"make_kwargs": {}}}, "make_kwargs"),
        ({"rec": {"create_kwargs": 3}}, "create_kwargs"),
        ({"rec": {"create_kwargs": {"instance_id": "x"}}}, "instance_id"),
    ],
)
def test_bad_tools_kwargs_name_the_row(kwargs, message):
    with pytest.raises(ValueError, match=message) as caught:
        ToolSession({"rec": Recorder()}, ToolContext(row_id="row-17"), kwargs)
    assert "row-17" in str(caught.value)


def test_kwargs_of_unselected_tools_and_empty_structs_are_fine():
    ToolSession({}, tools_kwargs={"other": {"create_kwargs": {"a": 1}}, "rec": None}, known_tools=["other"])


def test_a_verl_class_tool_runs_its_life_cycle(monkeypatch):
    monkeypatch.syspath_prepend(str(FIXTURES))
    tools = load_all_tools(FIXTURES / "verl_tool_config.yaml")

    async def main():
        kwargs = {"guess": {"create_kwargs": {"ground_truth": "42"}}}
        async with ToolSession(tools, ToolContext(row_id="1"), kwargs) as session:
            wrong = await session.call("guess", '{"guess": "41"}')
            right = await session.call("guess", '{"guess": "42"}')
            return wrong, right, await session.final_rewards()

    wrong, right, rewards = asyncio.run(main())
    assert (wrong.reward, right.reward, rewards) == (-0.25, 0.75, {"guess": 1.0})
    assert tools["guess"]._instance_dict == {}


@settings(max_examples=80, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text() | st.binary(),
        lambda x: st.lists(x) | st.tuples(x, x) | st.dictionaries(st.text(), x),
    )
)
def test_no_returned_value_escapes_as_an_exception(value):
    async def give():
        return value

    (result,), _ = run_calls([FunctionTool(give, "g", schema("g"))], ("g", "{}"))
    assert isinstance(result.text, str)
