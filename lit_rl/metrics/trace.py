"""Rollout trace: what happened in a conversation and when, as OpenTelemetry spans.

Position in the flow: agent worker, agent loop, tool session -> **spans** -> file in the run folder or an OTLP
collector. Spans nest: trajectory, turn, generate, tool, reward. Off by default; then a span costs one comparison, and
OpenTelemetry is not imported. Which rows are traced is decided by a hash of the row, so the same ones can be followed
over iterations.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_HASH_RANGE = 2**32


@dataclass(kw_only=True)
class TraceSettings:
    """What is traced and where it goes.

    Attributes:
        exporter: ``file`` (JSON lines, one file per worker), or ``otlp`` (HTTP, as many trace viewers take it).
        folder: Folder of the files; ``None``: ``traces`` in the run folder.
        endpoint: Address of the OTLP collector; ``None`` leaves it to ``OTEL_EXPORTER_OTLP_ENDPOINT``.
        row_share: Share of rows that are traced, in (0, 1]; all samples of a traced row are.
        with_text: Add the text of prompts and responses to ``generate`` spans.
        max_chars: Longest value of one attribute, characters.
        project_name: Name of the service in a viewer.
        experiment_name: Attribute of every span.
    """

    exporter: Literal["file", "otlp"] = "file"
    folder: str | None = None
    endpoint: str | None = None
    row_share: float = 1.0
    with_text: bool = False
    max_chars: int = 4000
    project_name: str = "lit_rl"
    experiment_name: str = ""

    def check(self) -> None:
        """Raise ``ValueError`` where an option is out of its range."""
        if self.exporter not in ("file", "otlp"):
            raise ValueError(f"data.agents.trace.exporter={self.exporter!r}: must be 'file' or 'otlp'.")
        if not 0 < self.row_share <= 1:
            raise ValueError(f"data.agents.trace.row_share={self.row_share}: must be above 0 and at most 1.")

    def in_run_folder(self, run_folder: str) -> TraceSettings:
        """The same settings with files in a run's folder, where they name none."""
        return self if self.folder else replace(self, folder=str(Path(run_folder).resolve() / "traces"))


class Span:
    """What a caller sees of a span. `set` does nothing where tracing is off."""

    is_on = False
    with_text = False

    def set(self, **attributes: Any) -> None:
        """Add attributes; what is no plain value is written as JSON, and long values are cut."""


class _LiveSpan(Span):
    is_on = True

    def __init__(self, span: Any, settings: TraceSettings) -> None:
        self._span = span
        self._settings = settings
        self.with_text = settings.with_text

    def set(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, _plain(value, self._settings.max_chars))


@dataclass
class _Trace:
    settings: TraceSettings
    provider: Any
    tracer: Any
    file: Any
    num_users: int = 1


_OFF: AbstractContextManager[Span] = contextlib.nullcontext(Span())
_trace: _Trace | None = None
_lock = threading.Lock()
_is_muted: ContextVar[bool] = ContextVar("lit_rl_trace_is_muted", default=False)


def init_trace(settings: TraceSettings) -> None:
    """Turn tracing on in this process. The first settings win until each user has called `shutdown_trace`.

    Raises:
        ValueError: If an option is out of range.
        ModuleNotFoundError: If OpenTelemetry's SDK is not installed.
    """
    global _trace
    settings.check()
    with _lock:
        if _trace is not None:
            _trace.num_users += 1
        else:
            _trace = _start(settings)


def shutdown_trace() -> None:
    """Write what is left and turn tracing off, once the last user says so. Blocks for the exporter."""
    global _trace
    with _lock:
        if _trace is None:
            return
        _trace.num_users -= 1
        if _trace.num_users > 0:
            return
        ended, _trace = _trace, None
    ended.provider.shutdown()
    if ended.file is not None:
        ended.file.close()


def is_row_traced(row_id: str) -> bool:
    """Whether tracing is on and the row is among those traced."""
    return _trace is not None and zlib.crc32(row_id.encode()) < _trace.settings.row_share * _HASH_RANGE


def trace_span(name: str, **attributes: Any) -> AbstractContextManager[Span]:
    """A span around a block, inside the current one; an exception that leaves the block is recorded."""
    if _trace is None or _is_muted.get():
        return _OFF
    return _live_span(_trace, name, attributes)


def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "trajectory",
    validate: bool = False,
    trace: bool = True,
    **attributes: Any,
) -> AbstractContextManager[Span]:
    """The root span of one trajectory; with ``trace=False`` nothing inside the block is traced.

    Args:
        sample_index: Position within the group.
        step: Iteration.
        rollout_n: As in verl: number of the rollout of its prompt.
        name: Name of the span.
        validate: Whether it belongs to a validation.
        trace: Whether to trace it.
        **attributes: Further ones.
    """
    if _trace is None:
        return _OFF
    if not trace:
        return _muted()
    attributes |= {"sample_index": sample_index, "step": step, "rollout_n": rollout_n, "validate": validate}
    return _live_span(_trace, name, attributes)


def rollout_trace_op(function: F) -> F:
    """Trace every call of a function or method, plain or async: arguments without ``self``, result or exception."""
    signature = inspect.signature(function)
    name = function.__qualname__

    def arguments(args: Any, kwargs: Any) -> dict[str, Any]:
        bound = signature.bind(*args, **kwargs).arguments
        return {f"inputs.{key}": value for key, value in bound.items() if key not in ("self", "cls")}

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def traced_async(*args: Any, **kwargs: Any) -> Any:
            if _trace is None or _is_muted.get():
                return await function(*args, **kwargs)
            with trace_span(name, **arguments(args, kwargs)) as span:
                result = await function(*args, **kwargs)
                span.set(output=result)
                return result

        return traced_async  # type: ignore[return-value]

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if _trace is None or _is_muted.get():
            return function(*args, **kwargs)
        with trace_span(name, **arguments(args, kwargs)) as span:
            result = function(*args, **kwargs)
            span.set(output=result)
            return result

    return traced  # type: ignore[return-value]


@contextmanager
def _live_span(trace: _Trace, name: str, attributes: dict[str, Any]) -> Iterator[Span]:
    with trace.tracer.start_as_current_span(name) as otel_span:
        span = _LiveSpan(otel_span, trace.settings)
        span.set(**{"experiment": trace.settings.experiment_name or None} | attributes)
        yield span


@contextmanager
def _muted() -> Iterator[Span]:
    token = _is_muted.set(True)
    try:
        yield Span()
    finally:
        _is_muted.reset(token)


def _start(settings: TraceSettings) -> _Trace:
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "data.agents.trace needs OpenTelemetry. Fix: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http."
        ) from error
    file = None
    exporter: Any
    if settings.exporter == "otlp":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=settings.endpoint)
    else:
        folder = Path(settings.folder or "traces")
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"trace_{os.getpid()}.jsonl").open("a", encoding="utf-8")
        exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    # A provider of our own: the process-wide one may belong to vLLM or the user.
    provider = TracerProvider(resource=Resource.create({"service.name": settings.project_name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return _Trace(settings, provider, provider.get_tracer("lit_rl"), file)


def _plain(value: Any, max_chars: int) -> str | bool | int | float:
    if isinstance(value, bool | int | float):
        return value
    if not isinstance(value, str):
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        try:
            value = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
    return str(value) if len(value) <= max_chars else f"{value[:max_chars]}... ({len(value)} characters)"
