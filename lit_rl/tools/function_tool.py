"""Stateless tools: a plain function, its schema read from signature and docstring.

Position in the flow: ``@function_tool`` in a user's file -> registry -> **FunctionTool.call** -> ToolSession.
The process-wide table of decorated functions serves notebooks and ``get_function_tool``;
`load_function_tools_from_path` does not depend on it, so loading a file twice, or under another name, is harmless.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, overload

from lit_rl.tools.daemon_threads import SYNC_TOOL_THREADS
from lit_rl.tools.returns import ToolReturn, normalize_function_tool_return
from lit_rl.tools.schemas import OpenAIFunctionToolSchema

F = TypeVar("F", bound=Callable[..., Any])

_PROCESS_TABLE: dict[str, FunctionTool] = {}
_table: contextvars.ContextVar[dict[str, FunctionTool] | None] = contextvars.ContextVar("function_tools", default=None)


class FunctionTool:
    """A function the policy can call.

    ``async def`` functions run on the event loop, others in a thread. A cancelled synchronous call is given up, not
    stopped.

    Args:
        function: What to call with the parsed arguments as keywords.
        name: Name the policy uses; default: the function's.
        schema: OpenAI tool schema; default: read from signature and Google docstring, which must describe every
            parameter.
        timeout_s: Wall-clock seconds of one call; default: the session's.
        max_concurrency: Calls at a time in one worker; default: no limit.

    Raises:
        ValueError: For ``*args`` or ``**kwargs`` without an explicit schema.
        DocstringParsingException: (transformers) where the docstring or a parameter's description is missing.
        TypeHintParsingException: (transformers) where a parameter has no type hint.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
        timeout_s: float | None = None,
        max_concurrency: int | None = None,
    ) -> None:
        self.function = function
        self.tool_schema = _read_schema(function, name, schema)
        self.name: str = self.tool_schema.function.name
        self.timeout_s = timeout_s
        self.max_concurrency = max_concurrency
        self.rate_limiter: Any = None
        target = function.func if isinstance(function, functools.partial) else function
        self.is_async: bool = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
            getattr(target, "__call__", None)  # noqa: B004 - asks whether __call__ is a coroutine function
        )

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema the policy sees."""
        return self.tool_schema

    async def call(self, parameters: dict[str, Any]) -> ToolReturn:
        """Call the function with ``parameters`` as keyword arguments; returns response, reward and metrics."""
        if self.is_async:
            return normalize_function_tool_return(await self.function(**parameters))
        value = await SYNC_TOOL_THREADS.run(functools.partial(self.function, **parameters))
        if inspect.isawaitable(value):
            value = await value
        return normalize_function_tool_return(value)


def _read_schema(
    function: Callable[..., Any], name: str | None, schema: OpenAIFunctionToolSchema | dict[str, Any] | None
) -> OpenAIFunctionToolSchema:
    if schema is None:
        function_name = name or getattr(function, "__name__", type(function).__name__)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(
                    f"Tool function '{function_name}' takes '{parameter}': the policy needs named parameters. "
                    "List them, or pass schema=."
                )
        # Imported here: it loads torch (transformers 5.19 asks for its tensor type), 3 s that only inferred schemas
        # need.
        from transformers.utils.chat_template_utils import get_json_schema

        schema = get_json_schema(function)
    if isinstance(schema, dict):
        schema = OpenAIFunctionToolSchema.model_validate(schema)
    if name is not None and schema.function.name != name:
        schema = schema.model_copy(update={"function": schema.function.model_copy(update={"name": name})})
    return schema


@overload
def function_tool(name: F, /) -> F: ...


@overload
def function_tool(
    name: str | None = None,
    *,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
    timeout_s: float | None = None,
    max_concurrency: int | None = None,
) -> Callable[[F], F]: ...


def function_tool(
    name: Any = None,
    *,
    schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None,
    timeout_s: float | None = None,
    max_concurrency: int | None = None,
) -> Any:
    """Make a function a tool.

    Write ``@function_tool``, ``@function_tool("name")`` or ``@function_tool(name=..., schema=...)``.

    The function itself is returned unchanged.

    Args:
        name: Name the policy uses; default: the function's.
        schema: See `FunctionTool`.
        timeout_s: See `FunctionTool`.
        max_concurrency: See `FunctionTool`.

    Raises:
        ValueError: If a different function already has that name.
    """
    if callable(name):
        return function_tool(None)(name)

    def register(function: F) -> F:
        _add(FunctionTool(function, name, schema, timeout_s, max_concurrency))
        return function

    return register


def get_function_tool(name: str) -> FunctionTool:
    """Return the tool that ``@function_tool`` made in this process.

    Raises:
        KeyError: If there is none of that name.
    """
    if name not in _PROCESS_TABLE:
        raise KeyError(f"No function tool named '{name}'; there are: {sorted(_PROCESS_TABLE)}.")
    return _PROCESS_TABLE[name]


def process_function_tools() -> dict[str, FunctionTool]:
    """Return a copy of the process-wide table of decorated functions."""
    return dict(_PROCESS_TABLE)


@contextmanager
def collect_function_tools() -> Iterator[dict[str, FunctionTool]]:
    """Collect what ``@function_tool`` makes inside the block, apart from the process-wide table."""
    tools: dict[str, FunctionTool] = {}
    token = _table.set(tools)
    try:
        yield tools
    finally:
        _table.reset(token)
    for name, tool in tools.items():
        _PROCESS_TABLE.setdefault(name, tool)


def _add(tool: FunctionTool) -> None:
    collected = _table.get()
    table = _PROCESS_TABLE if collected is None else collected
    present = table.get(tool.name)
    if present is not None and _origin(present.function) != _origin(tool.function):
        raise ValueError(
            f"Two functions want the tool name '{tool.name}': {_describe(present.function)} and "
            f"{_describe(tool.function)}. Rename one with @function_tool(name=...)."
        )
    table[tool.name] = tool


def _origin(function: Callable[..., Any]) -> object:
    """Where a function was written: the same after its file or notebook cell is executed again."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return function
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _describe(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}{place}"
