"""Spans of conversations: nesting, sampling by row, and nothing at all when off."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lit_rl.metrics import trace
from lit_rl.metrics.trace import (
    TraceSettings,
    init_trace,
    is_row_traced,
    rollout_trace_attr,
    rollout_trace_op,
    shutdown_trace,
    trace_span,
)

pytest.importorskip("opentelemetry.sdk")


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    assert trace._trace is None
    yield
    while trace._trace is not None:
        shutdown_trace()


def spans_in(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return {span["name"]: span for span in map(json.loads, lines)}


class Thing:
    @rollout_trace_op
    async def ask(self, question: str, times: int = 1) -> dict[str, int]:
        return {"length": len(question) * times}

    @rollout_trace_op
    def fail(self) -> None:
        raise ZeroDivisionError("by zero")


def test_spans_nest_and_hold_arguments_results_and_errors(tmp_path: Path) -> None:
    init_trace(TraceSettings(folder=str(tmp_path), max_chars=40, experiment_name="e1"))

    async def main() -> None:
        with rollout_trace_attr(3, step=2, row_id="r") as root:
            with trace_span("turn", number=1):
                assert await Thing().ask("abc", times=2) == {"length": 6}
                with pytest.raises(ZeroDivisionError):
                    Thing().fail()
            root.set(reward=0.5, error=None, text="x" * 100)

    asyncio.run(main())
    shutdown_trace()
    spans = spans_in(tmp_path)
    root, turn, ask, fail = (spans[name] for name in ("trajectory", "turn", "Thing.ask", "Thing.fail"))
    assert turn["parent_id"] == root["context"]["span_id"]
    assert ask["parent_id"] == fail["parent_id"] == turn["context"]["span_id"]
    assert root["attributes"] == {
        "experiment": "e1", "sample_index": 3, "step": 2, "validate": False, "row_id": "r", "reward": 0.5,
        "text": "x" * 40 + "... (100 characters)",
    }  # fmt: skip
    assert ask["attributes"] == {
        "experiment": "e1", "inputs.question": "abc", "inputs.times": 2, "output": '{"length": 6}'
    }  # fmt: skip
    assert fail["events"][0]["attributes"]["exception.type"] == "ZeroDivisionError"
    assert fail["status"]["status_code"] == "ERROR"


def test_an_untraced_trajectory_mutes_what_is_inside_and_nothing_else(tmp_path: Path) -> None:
    init_trace(TraceSettings(folder=str(tmp_path)))

    async def trajectory(name: str, is_traced: bool) -> None:
        with rollout_trace_attr(name=name, trace=is_traced):
            await asyncio.sleep(0.01)
            with trace_span(f"inside {name}") as span:
                assert span.is_on == is_traced

    async def main() -> None:
        await asyncio.gather(trajectory("one", True), trajectory("two", False), trajectory("three", True))

    asyncio.run(main())
    shutdown_trace()
    assert sorted(spans_in(tmp_path)) == ["inside one", "inside three", "one", "three"]


def test_the_same_rows_are_traced_every_time(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(1000)]
    assert not any(map(is_row_traced, rows))
    init_trace(TraceSettings(folder=str(tmp_path), row_share=0.1))
    traced = [row for row in rows if is_row_traced(row)]
    assert 60 < len(traced) < 140
    shutdown_trace()
    init_trace(TraceSettings(folder=str(tmp_path), row_share=0.1))
    assert [row for row in rows if is_row_traced(row)] == traced


def test_the_first_settings_win_until_every_user_is_done(tmp_path: Path) -> None:
    init_trace(TraceSettings(folder=str(tmp_path / "one")))
    init_trace(TraceSettings(folder=str(tmp_path / "two")))
    shutdown_trace()
    with trace_span("still on"):
        pass
    shutdown_trace()
    shutdown_trace()
    assert list(spans_in(tmp_path / "one")) == ["still on"]
    assert not (tmp_path / "two").exists()


def test_when_off_nothing_is_imported_and_results_pass_through() -> None:
    assert asyncio.run(Thing().ask("abc")) == {"length": 3}
    with rollout_trace_attr(row_id="r") as span, trace_span("x") as inner:
        assert not span.is_on
        assert not inner.is_on
        span.set(anything=object())
    code = "import sys, lit_rl.agents.worker, lit_rl.tools; print('opentelemetry' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.strip() == "False"


def test_options_out_of_range_are_refused() -> None:
    for settings, message in [({"row_share": 0.0}, "row_share=0.0"), ({"exporter": "weave"}, "'weave'")]:
        with pytest.raises(ValueError, match=message):
            init_trace(TraceSettings(**settings))  # type: ignore[arg-type]
    settings = TraceSettings().in_run_folder("/runs/1")
    assert settings.folder == "/runs/1/traces"
    assert TraceSettings(folder="x").in_run_folder("/runs/1").folder == "x"
