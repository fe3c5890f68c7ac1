"""The decorator, inferred schemas, and where functions run."""

import asyncio
import threading
import time

import pytest

from lit_rl.tools import FunctionTool, function_tool, get_function_tool
from lit_rl.tools.daemon_threads import DaemonThreads

SCHEMA = {"type": "function", "function": {"name": "t", "description": "", "parameters": {"type": "object"}}}


def test_schema_is_read_from_signature_and_docstring():
    def find(query: str, limits: list[int], exact: bool = False, year: int | None = None) -> str:
        """Find documents.

        Args:
            query: What to look for.
            limits: Numbers.
            exact: Whether words must match.
            year: Year of publication.
        """
        return query

    schema = FunctionTool(find, name="search").tool_schema.to_dict()

    function = schema["function"]
    assert (function["name"], function["description"]) == ("search", "Find documents.")
    assert function["parameters"]["required"] == ["query", "limits"]
    # Nested types reach the model: verl drops "items".
    assert function["parameters"]["properties"]["limits"] == {
        "type": "array",
        "items": {"type": "integer"},
        "description": "Numbers.",
    }
    assert "return" not in function


def test_a_function_without_docstring_or_hints_is_refused():
    def bare(x: int):
        return x

    def unhinted(x):
        """Do.

        Args:
            x: A number.
        """

    def starred(*args: int):
        """Do.

        Args:
            args: Numbers.
        """

    for function in (bare, unhinted, starred):
        with pytest.raises(Exception, match=r"docstring|hint|named parameters"):
            FunctionTool(function)


def test_the_decorator_returns_the_function_and_refuses_a_second_owner_of_a_name():
    def first():
        return 1

    def second():
        return 2

    register = function_tool("taken_name", schema=SCHEMA)
    assert register(first) is first
    assert register(first) is first
    assert get_function_tool("taken_name").function is first
    with pytest.raises(ValueError, match=r"first.*second"):
        register(second)
    with pytest.raises(KeyError, match="no_such_tool"):
        get_function_tool("no_such_tool")


def test_sync_functions_run_off_the_event_loop():
    async def main():
        names = (await FunctionTool(lambda: threading.current_thread().name, "t", SCHEMA).call({}))[0].text
        assert names == "lit-rl-tool"
        assert names != threading.current_thread().name

    asyncio.run(main())


def test_given_up_calls_free_their_place_and_end_with_the_call():
    async def main():
        threads = DaemonThreads(max_threads=1, max_given_up=2)
        stop = threading.Event()
        hanging = [asyncio.ensure_future(threads.run(stop.wait)) for _ in range(2)]
        await asyncio.sleep(0.05)
        hanging[0].cancel()
        await asyncio.sleep(0.05)
        hanging[1].cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        assert threads.num_given_up == 2
        with pytest.raises(RuntimeError, match="never returned"):
            await threads.run(lambda: 1)
        stop.set()
        deadline = time.monotonic() + 5
        while threads.num_given_up and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert await threads.run(lambda: 7) == 7
        assert threads.num_given_up == 0

    asyncio.run(main())


def test_a_queued_call_that_is_cancelled_never_runs():
    async def main():
        threads = DaemonThreads(max_threads=1)
        stop, ran = threading.Event(), []
        busy = asyncio.ensure_future(threads.run(stop.wait))
        await asyncio.sleep(0.02)
        queued = asyncio.ensure_future(threads.run(lambda: ran.append(1)))
        await asyncio.sleep(0.02)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        stop.set()
        await busy
        assert await threads.run(lambda: 3) == 3
        assert ran == []

    asyncio.run(main())


def test_exceptions_that_would_end_the_loop_become_errors():
    async def main():
        for raised in (StopIteration("s"), SystemExit(3), KeyboardInterrupt()):

            def call(raised=raised):
                raise raised

            with pytest.raises(RuntimeError, match=type(raised).__name__):
                await DaemonThreads().run(call)

    asyncio.run(main())
