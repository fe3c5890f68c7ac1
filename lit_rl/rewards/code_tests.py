"""Programs: the share of test cases that the code of a response passes, run in the sandbox.

What a program should answer never enters the sandbox, except for assertions. If no sandbox can be had, scoring fails;
it is not scored 0.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from lit_rl.tools.sandbox import SandboxLimits, run_python
from lit_rl.tools.sandbox_fusion_tools import SandboxFusionClient

_FENCED = re.compile(r"```([^\n`]*)\n(.*?)```", re.DOTALL)
_PYTHON = ("python", "python3", "py")
# Solutions in the style of LeetCode are methods of a class Solution.
_CALL = """
import json as _json, sys as _sys
_call = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
_result = _call(*_json.loads(_sys.stdin.read()))
print({marker!r} + _json.dumps(_result, default=list))
"""


@dataclass(kw_only=True)
class _Case:
    """One test: the program, its input, and what it must print; ``marker`` stands before what is compared."""

    code: str
    stdin: str = ""
    expected: Any = ""
    marker: str = ""


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    max_tests: int = 10,
    max_parallel_runs: int = 4,
    wall_s: float = 4.0,
    memory_mb: int = 1024,
    sandbox_fusion_url: str | None = None,
) -> dict[str, float]:
    """Score one response.

    Args:
        solution_str: The response; its last fenced Python block is the program, or the first fenced block of another
            kind.
        ground_truth: Test cases, as a mapping or its JSON: ``inputs`` and ``outputs`` (texts for standard input and
            output; with ``fn_name`` lists of arguments, or one JSON value per line, and the returned values), or
            ``assert_case`` (a list of statements run after the program).
        extra_info: Not used.
        max_tests: Only so many of the first cases are run.
        max_parallel_runs: Processes at a time.
        wall_s: Wall clock of one run, seconds.
        memory_mb: Memory of one run, MiB.
        sandbox_fusion_url: Run on this service instead of in processes of this machine.

    Returns:
        ``score``: share of passed cases; ``acc``: 1.0 if all passed; ``has_code``; ``timeout_share``.

    Raises:
        ValueError: If the test cases cannot be read.
        SandboxUnavailable: If this machine cannot isolate code.
    """
    match = _find_code(solution_str)
    cases = _read_cases(ground_truth, match or "")[:max_tests]
    if match is None:
        return {"score": 0.0, "acc": 0.0, "has_code": 0.0, "timeout_share": 0.0}
    limits = SandboxLimits(wall_s=wall_s, memory_mb=memory_mb)
    verdicts: list[bool | None] = _run_to_end(_run_cases(cases, limits, max_parallel_runs, sandbox_fusion_url))
    share = sum(verdict is True for verdict in verdicts) / len(verdicts)
    timeouts = sum(verdict is None for verdict in verdicts) / len(verdicts)
    return {"score": share, "acc": float(share == 1.0), "has_code": 1.0, "timeout_share": timeouts}


def _find_code(text: str) -> str | None:
    blocks = [(found.group(1).strip().lower(), found.group(2)) for found in _FENCED.finditer(text)]
    python = [code for language, code in blocks if language in _PYTHON]
    return python[-1] if python else blocks[0][1] if blocks else None


def _read_cases(ground_truth: Any, code: str) -> list[_Case]:
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError(f"ground_truth must be a mapping of test cases, not {type(tests).__name__}.")
    marker = f"result-{secrets.token_hex(8)} "
    if tests.get("assert_case"):
        # Printed at the end, so that leaving early passes nothing.
        return [
            _Case(code=f"{code}\n{statement}\nprint({marker!r})", marker=marker) for statement in tests["assert_case"]
        ]
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not inputs or outputs is None or len(inputs) != len(outputs):
        raise ValueError(
            "ground_truth needs 'inputs' and 'outputs' of equal length, at least one, or 'assert_case'. "
            f"Keys present: {sorted(tests)}."
        )
    name = tests.get("fn_name")
    if not name:
        return [_Case(code=code, stdin=str(i), expected=str(o)) for i, o in zip(inputs, outputs, strict=True)]
    code += _CALL.format(name=name, marker=marker)
    return [
        _Case(code=code, stdin=json.dumps(_arguments(i)), expected=_value(o), marker=marker)
        for i, o in zip(inputs, outputs, strict=True)
    ]


def _arguments(given: Any) -> list[Any]:
    return [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)


def _value(given: Any) -> Any:
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


async def _run_cases(
    cases: list[_Case], limits: SandboxLimits, max_parallel_runs: int, url: str | None
) -> list[bool | None]:
    slots = asyncio.Semaphore(max_parallel_runs)
    client = SandboxFusionClient(url, limits.memory_mb) if url else None

    async def run(case: _Case) -> bool | None:
        """Whether the case passed; ``None`` for a time-out."""
        async with slots:
            if client is None:
                result = await run_python(case.code, stdin=case.stdin, limits=limits)
                status, stdout = result.status, result.stdout
                has_ended, is_timeout = status == "finished", status == "timeout"
            else:
                reply = await client.run_code(case.code, language="python", timeout_s=limits.wall_s, stdin=case.stdin)
                ran = reply.get("run_result") or {}
                stdout = str(ran.get("stdout") or "")
                has_ended, is_timeout = reply["status"] == "Success", ran.get("status") == "TimeLimitExceeded"
        return None if is_timeout else has_ended and _is_right(stdout, case)

    try:
        return list(await asyncio.gather(*(run(case) for case in cases)))
    finally:
        if client is not None:
            await client.close()


def _is_right(stdout: str, case: _Case) -> bool:
    if not case.marker:
        return _lines(stdout) == _lines(case.expected)
    _, found, result = stdout.rpartition(case.marker)
    if not found or case.expected == "":
        return bool(found)
    try:
        value = json.loads(result)
    except ValueError:
        return False
    # Some data sets wrap the one returned value into a list.
    return value == case.expected or [value] == case.expected


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine from plain code, also where an event loop is running in this thread (a notebook)."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
