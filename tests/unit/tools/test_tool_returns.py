"""Every kind of value a tool function may return (contracts 7.4, case O07)."""

import asyncio

import pytest

from lit_rl.tools import FunctionTool, ToolResponse, normalize_function_tool_return

SCHEMA = {"type": "function", "function": {"name": "t", "description": "", "parameters": {"type": "object"}}}


class Thing:
    def __str__(self):
        return "a thing"


# O07
VALUES = [
    ("ok", "ok"),
    ({"a": 1, "é": "x"}, '{"a": 1, "é": "x"}'),
    ([1, 2], "[1, 2]"),
    (["é"], '["é"]'),
    (3, "3"),
    (2.5, "2.5"),
    (True, "True"),
    (None, ""),
    ("né".encode(), "né"),
    (b"\xff", "\ufffd"),
    (Thing(), "a thing"),
]


@pytest.mark.parametrize(("value", "text"), VALUES)
def test_a_returned_value_becomes_text_for_def_and_async_def(value, text):
    async def asynchronous():
        return value

    for function in (lambda: value, asynchronous):
        response, reward, metrics = asyncio.run(FunctionTool(function, "t", SCHEMA).call({}))
        assert (response.text, reward, metrics) == (text, 0.0, {})


def test_tuples_carry_reward_and_metrics():
    assert normalize_function_tool_return(("a",))[1:] == (0.0, {})
    assert normalize_function_tool_return(("a", 2))[1:] == (2.0, {})
    assert normalize_function_tool_return(("a", None))[1:] == (0.0, {})
    assert normalize_function_tool_return(("a", False, None))[1:] == (0.0, {})
    response, reward, metrics = normalize_function_tool_return(({"k": "é"}, "0.5", [("n", 1)]))
    assert (response.text, reward, metrics) == ('{"k": "é"}', 0.5, {"n": 1})


def test_a_tool_response_is_kept_as_it_is():
    response = ToolResponse(text="x", image=["img"])
    assert normalize_function_tool_return(response)[0] is response
    assert normalize_function_tool_return((response, 1.0))[0] is response


@pytest.mark.parametrize(
    "value", [(), (1, 2, {}, 4), ("a", "high"), ("a", [1]), ("a", 1, 5), {"o": object()}, {(1, 2): 3}]
)
def test_values_without_a_reading_raise(value):
    with pytest.raises((TypeError, ValueError)):
        normalize_function_tool_return(value)


def test_media_must_be_lists():
    for bad in ({"image": "one"}, {"video": None}):
        with pytest.raises(ValueError, match="must be a list"):
            ToolResponse(**bad)
    assert ToolResponse().is_empty()
    assert ToolResponse(text="x").is_text_only()
    assert not ToolResponse(text="x", image=["i"]).is_text_only()
