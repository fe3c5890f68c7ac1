"""The tools of one trajectory: every call answered, every instance released.

Position in the flow: agent loop -> **ToolSession** -> BaseTool or FunctionTool. A call never raises for what the
policy or the tool did: unknown tools, bad arguments, errors and time-outs become text for the policy and a counter.
Bad ``tools_kwargs`` of a row raise at construction, so that the trajectory fails with the row's name. Text is not
shortened here: the agent loop knows the budget in tokens.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lit_rl.metrics.trace import trace_span
from lit_rl.tools.argument_check import InvalidArguments, check_arguments, decode_arguments
from lit_rl.tools.base_tool import BaseTool, ToolContext
from lit_rl.tools.function_tool import FunctionTool
from lit_rl.tools.returns import ToolReturn
from lit_rl.tools.row_kwargs import KWARGS_GROUPS, check_tools_kwargs, method_kwargs
from lit_rl.tools.schemas import ToolResponse

Tool = BaseTool | FunctionTool
ToolStatus = Literal["ok", "unknown_tool", "invalid_arguments", "error", "timeout"]

MAX_ERROR_CHARS = 300
CLOSE_TIMEOUT_S = 5.0
CANCEL_GRACE_S = 1.0
"""How long a cancelled tool may take to clean up before it is left alone."""

logger = logging.getLogger(__name__)
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakKeyDictionary[Any, asyncio.Semaphore]] = WeakKeyDictionary()
_tools_with_traceback: set[str] = set()


@dataclass(kw_only=True)
class ToolResult:
    """The answer to one call.

    Attributes:
        text: Text for the policy.
        image: Images, in order.
        video: Videos, in order.
        reward: Step reward; 0.0 where the tool did not run.
        status: How the call went.
        metrics: What the tool reported.
    """

    text: str = ""
    image: list[Any] = field(default_factory=list)
    video: list[Any] = field(default_factory=list)
    reward: float = 0.0
    status: ToolStatus = "ok"
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def is_invalid(self) -> bool:
        """Whether the policy called wrongly, so that no tool ran."""
        return self.status in ("unknown_tool", "invalid_arguments")


class _Instance:
    """One class tool's state in this trajectory; ``created`` ends with the instance id or the error of ``create``."""

    def __init__(self, instance_id: str) -> None:
        self.instance_id = instance_id
        self.created: asyncio.Task | None = None
        self.has_failed = False


class ToolSession:
    """Answers the calls of one trajectory; use as ``async with``, whose end releases every instance.

    Args:
        tools: Tools by name; already narrowed to the row's selection.
        context: Identity of the trajectory.
        tools_kwargs: The row's ``tools_kwargs``: tool name to groups ``create_kwargs``, ``execute_kwargs``,
            ``calc_reward_kwargs``, ``release_kwargs``.
        known_tools: Names that ``tools_kwargs`` may mention beside ``tools``.
        timeout_s: Seconds of wall clock per call, where the tool sets no own limit.

    Raises:
        ValueError: If ``tools_kwargs`` cannot be used; the message names the row.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        context: ToolContext | None = None,
        tools_kwargs: Mapping[str, Any] | None = None,
        *,
        known_tools: Iterable[str] = (),
        timeout_s: float = 60.0,
    ) -> None:
        self.tools = tools
        self.context = context or ToolContext()
        self.timeout_s = timeout_s
        self.metrics: dict[str, float] = {}
        self.tools_kwargs = check_tools_kwargs(tools_kwargs, tools, set(known_tools), self.context.row_id)
        self._instances: dict[str, _Instance] = {}
        self._release: asyncio.Task | None = None

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def call(self, name: str, arguments: Any) -> ToolResult:
        """Run one call and return its answer.

        Args:
            name: Tool name as the policy wrote it.
            arguments: JSON text or a dict.
        """
        started = time.perf_counter()
        with trace_span("tool", tool=name, arguments=arguments) as span:
            result = await self._call(name, arguments)
            span.set(status=result.status, output=result.text, reward=result.reward, metrics=result.metrics)
        self._count("num_tool_calls", 1)
        self._count("tool_calls_s", time.perf_counter() - started)
        if result.is_invalid:
            self._count("num_invalid_calls", 1)
        elif result.status == "timeout":
            self._count("num_tool_timeouts", 1)
        elif result.status == "error" or result.metrics.get("is_error"):
            self._count("num_tool_errors", 1)
        for key, value in result.metrics.items():
            if isinstance(value, int | float):
                self._count(f"tool/{name}/{key}", float(value))
        return result

    def count_malformed(self) -> None:
        """Count a call that could not even be parsed."""
        self._count("num_invalid_calls", 1)

    async def final_rewards(self) -> dict[str, float]:
        """Ask every class tool that was used for its reward of the whole trajectory, by tool name.

        Raises:
            RuntimeError: If a tool's ``calc_reward`` raised or ran too long: a failure is never scored 0.
        """
        rewards = {}
        for name, instance in self._instances.items():
            tool = self.tools[name]
            if instance.has_failed or not isinstance(tool, BaseTool):
                continue
            kwargs = method_kwargs(tool.calc_reward, "calc_reward_kwargs", self._group(name, "calc_reward_kwargs"))
            outcome = await bounded(tool.calc_reward(instance.instance_id, **kwargs), self._limit_s(tool))
            if isinstance(outcome, BaseException):
                raise RuntimeError(f"Tool '{name}': calc_reward failed: {_describe(outcome)}") from outcome
            rewards[name] = float(outcome)
        return rewards

    async def release(self) -> None:
        """Release every instance once; goes on in the background when the caller is cancelled meanwhile."""
        if self._release is None:
            if not self._instances:
                return
            self._release = asyncio.ensure_future(self._release_all())
        await asyncio.shield(self._release)

    async def _call(self, name: str, arguments: Any) -> ToolResult:
        tool = self.tools.get(name) if isinstance(name, str) else None
        if tool is None:
            shown = str(name)[:100]
            names = ", ".join(self.tools) or "none"
            return ToolResult(text=f"Unknown tool '{shown}'. Available tools: {names}.", status="unknown_tool")
        try:
            parameters = decode_arguments(arguments)
            check_arguments(tool, parameters)
        except InvalidArguments as error:
            return ToolResult(text=f"Invalid call of tool '{name}': {error}.", status="invalid_arguments")
        except Exception as error:  # a schema that cannot be resolved is the tool's fault, not the policy's
            return self._failure(name, error)
        slot = _slot(tool)
        if slot is None:
            return await self._run_limited(name, tool, parameters)
        async with slot:
            return await self._run_limited(name, tool, parameters)

    async def _run_limited(self, name: str, tool: Tool, parameters: dict[str, Any]) -> ToolResult:
        if tool.rate_limiter is None:
            return await self._run(name, tool, parameters)
        started = time.perf_counter()
        try:
            async with tool.rate_limiter.lease():
                self._count("rate_limit_wait_s", time.perf_counter() - started)
                return await self._run(name, tool, parameters)
        except TimeoutError:
            return ToolResult(text=f"Tool '{name}' is busy.", status="timeout")

    async def _run(self, name: str, tool: Tool, parameters: dict[str, Any]) -> ToolResult:
        limit_s = self._limit_s(tool)
        call = tool.call(parameters) if isinstance(tool, FunctionTool) else self._execute(name, tool, parameters)
        outcome = await bounded(call, limit_s)
        if isinstance(outcome, TimedOut):
            return ToolResult(text=f"Tool '{name}' did not answer within {limit_s:g} s.", status="timeout")
        if isinstance(outcome, BaseException):
            return self._failure(name, outcome)
        try:
            response, reward, metrics = outcome
            if not isinstance(response, ToolResponse):
                response = ToolResponse(text=response if isinstance(response, str) else str(response))
            return ToolResult(
                text=response.text or "",
                image=response.image or [],
                video=response.video or [],
                reward=0.0 if reward is None else float(reward),
                metrics=dict(metrics or {}),
            )
        except Exception as error:  # a class tool that returns something else is user code too
            return self._failure(name, error)

    async def _execute(self, name: str, tool: BaseTool, parameters: dict[str, Any]) -> ToolReturn:
        instance = self._instances.get(name)
        if instance is None:
            instance = self._instances[name] = _Instance(f"{self.context.row_id}-{id(self):x}-{name}")
            instance.created = asyncio.ensure_future(self._create(name, tool, instance))
        assert instance.created is not None
        # Shielded: a time-out of one call must not cancel the create that a parallel call waits for.
        await asyncio.shield(instance.created)
        kwargs = method_kwargs(tool.execute, "execute_kwargs", self._group(name, "execute_kwargs"), self.context)
        return await tool.execute(instance.instance_id, parameters, **kwargs)

    async def _create(self, name: str, tool: BaseTool, instance: _Instance) -> None:
        kwargs = method_kwargs(tool.create, "create_kwargs", self._group(name, "create_kwargs"), self.context)
        try:
            created = await tool.create(instance_id=instance.instance_id, **kwargs)
            instance.instance_id = created[0] if isinstance(created, tuple) else created
        except BaseException:
            instance.has_failed = True
            raise

    async def _release_all(self) -> None:
        for name, instance in self._instances.items():
            tool = self.tools[name]
            assert isinstance(tool, BaseTool)
            assert instance.created is not None
            if not instance.created.done():
                instance.created.cancel()
                await asyncio.wait({instance.created}, timeout=CANCEL_GRACE_S)
            if instance.created.done() and not instance.created.cancelled():
                instance.created.exception()  # marks it as seen; the call has reported it
            kwargs = method_kwargs(tool.release, "release_kwargs", self._group(name, "release_kwargs"))
            outcome = await bounded(tool.release(instance.instance_id, **kwargs), self._limit_s(tool))
            if isinstance(outcome, BaseException):
                self._count("num_tool_release_errors", 1)
                logger.warning("Tool '%s': release failed for row %s: %r", name, self.context.row_id, outcome)

    def _failure(self, name: str, error: BaseException) -> ToolResult:
        if name not in _tools_with_traceback:
            _tools_with_traceback.add(name)
            logger.warning(
                "Tool '%s' failed in row %s; the policy sees the error, further tracebacks are not shown.",
                name,
                self.context.row_id,
                exc_info=error,
            )
        return ToolResult(text=f"Tool '{name}' failed: {_describe(error)}", status="error")

    def _group(self, name: str, group: str) -> dict[str, Any]:
        assert group in KWARGS_GROUPS
        return self.tools_kwargs.get(name, {}).get(group) or {}

    def _limit_s(self, tool: Tool) -> float:
        return self.timeout_s if tool.timeout_s is None else tool.timeout_s

    def _count(self, key: str, amount: float) -> None:
        self.metrics[key] = self.metrics.get(key, 0.0) + amount


async def close_tools(tools: Mapping[str, Tool]) -> None:
    """Close the class tools of a worker at once, each within `CLOSE_TIMEOUT_S`; failures are logged."""

    async def close(name: str, tool: BaseTool) -> None:
        outcome = await bounded(tool.close(), CLOSE_TIMEOUT_S)
        if isinstance(outcome, BaseException):
            logger.warning("Tool '%s': close failed: %r", name, outcome)

    await asyncio.gather(*(close(name, tool) for name, tool in tools.items() if isinstance(tool, BaseTool)))


class TimedOut(Exception):
    """Our limit ended the call."""


async def bounded(call: Awaitable[Any], timeout_s: float) -> Any:
    """Return the result or the exception of ``call``; a call that ignores its cancellation is left behind."""
    task = asyncio.ensure_future(call)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return TimedOut(f"no answer within {timeout_s:g} s")
    if task.cancelled():
        return RuntimeError("the tool cancelled itself")
    return task.exception() or task.result()


def _slot(tool: Tool) -> asyncio.Semaphore | None:
    if tool.max_concurrency is None:
        return None
    slots = _slots.setdefault(asyncio.get_running_loop(), WeakKeyDictionary())
    if tool not in slots:
        slots[tool] = asyncio.Semaphore(tool.max_concurrency)
    return slots[tool]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
