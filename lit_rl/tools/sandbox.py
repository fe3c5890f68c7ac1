"""Run Python code that a policy wrote, in a process that can do nothing else.

Position in the flow: ToolSession -> SandboxTool -> **run_python** -> a fresh process (see `sandbox_child`). The
process gets an empty environment and an empty folder, no network, no other process, bounded time, memory, files and
output; where bubblewrap is installed also namespaces of its own. It is one process on this machine; for a service of
many machines see `lit_rl.tools.sandbox_fusion_tools`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.bubblewrap import bubblewrap_prefix, exit_code_of
from lit_rl.tools.sandbox_child import SETUP_FAILED
from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_CHILD = str(Path(__file__).with_name("sandbox_child.py"))
_WATCH_S = 0.1
_MEGABYTE = 2**20
_NO_OUTPUT = "no stdout here"

RunStatus = Literal["finished", "failed", "timeout", "memory", "disk"]


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate a process."""


@dataclass(kw_only=True)
class SandboxLimits:
    """What the code may use.

    Attributes:
        wall_s: Wall clock, seconds.
        cpu_s: Processor time, seconds; ``None``: as much as ``wall_s``.
        memory_mb: Address space, MiB.
        disk_mb: All files together, MiB.
        output_chars: Characters kept of each output stream; the rest is read and dropped.
    """

    wall_s: float = 10.0
    cpu_s: int | None = None
    memory_mb: int = 1024
    disk_mb: int = 64
    output_chars: int = 20_000


@dataclass(kw_only=True)
class SandboxResult:
    """How a run ended.

    Attributes:
        status: ``finished`` with exit status 0, ``failed`` otherwise, or the limit that ended it.
        stdout: Standard output, at most ``output_chars``.
        stderr: Standard error, at most ``output_chars``.
        exit_code: Exit status; negative for a signal.
        wall_s: Seconds it took.
    """

    status: RunStatus
    stdout: str
    stderr: str
    exit_code: int
    wall_s: float


async def run_python(
    code: str, *, stdin: str = "", limits: SandboxLimits | None = None, is_isolated: bool = True
) -> SandboxResult:
    """Run ``code`` as a program.

    Args:
        code: Python source.
        stdin: Text on its standard input.
        limits: What it may use.
        is_isolated: False leaves out file and system-call restrictions: only for code that is trusted.

    Raises:
        SandboxUnavailable: If this machine cannot isolate it; nothing has run then.
    """
    limits = limits or SandboxLimits()
    folder = tempfile.mkdtemp(prefix="lit-rl-sandbox-")
    try:
        Path(folder, "main.py").write_text(code, encoding="utf-8", errors="replace")
        return await _run_in(folder, stdin, limits, is_isolated)
    finally:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _run_in(folder: str, stdin: str, limits: SandboxLimits, is_isolated: bool) -> SandboxResult:
    started = time.monotonic()
    options = _child_options(limits, is_isolated)
    # Found by a probe the first time, which takes a moment.
    wrapping = await asyncio.to_thread(bubblewrap_prefix, [*options["readable"], _CHILD], folder) if is_isolated else []
    options["needs_landlock"] = not wrapping
    process = await asyncio.create_subprocess_exec(
        *wrapping,
        sys.executable,
        "-I",
        "-S",
        _CHILD,
        json.dumps(options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=folder,
        # Nothing is inherited: no tokens, no paths.
        env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    reads = [
        asyncio.ensure_future(_read_head(stream, limits.output_chars)) for stream in (process.stdout, process.stderr)
    ]
    feed = asyncio.ensure_future(_feed(process, stdin))
    try:
        ended_by = await _watch(process, folder, limits, started)
        # The outputs end with the process: it has no children that could hold them open.
        stdout, stderr = await asyncio.wait_for(asyncio.gather(*reads), timeout=5.0)
    finally:
        _kill(process)
        for task in (feed, *reads):
            task.cancel()
        await process.wait()
    exit_code = process.returncode or 0
    if wrapping:
        exit_code = exit_code_of(exit_code)
    if exit_code == SETUP_FAILED and stderr.startswith("sandbox: "):
        raise SandboxUnavailable(
            f"This machine cannot isolate code ({stderr.strip()}): Linux 5.13 with Landlock and seccomp is needed. "
            "Use lit_rl.tools.sandbox_fusion_tools, or set config.isolation: none for code that you trust."
        )
    status = ended_by or _status(exit_code, stderr)
    return SandboxResult(
        status=status, stdout=stdout, stderr=stderr, exit_code=exit_code, wall_s=time.monotonic() - started
    )


def _child_options(limits: SandboxLimits, is_isolated: bool) -> dict[str, Any]:
    paths = {sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), *sysconfig.get_paths().values()}
    system = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
    return {
        "is_isolated": is_isolated,
        "readable": sorted({*paths, *system}),
        "limits": {
            "cpu_s": limits.cpu_s or max(1, round(limits.wall_s)),
            "memory": limits.memory_mb * _MEGABYTE,
            "file": limits.disk_mb * _MEGABYTE,
        },
    }


async def _watch(
    process: asyncio.subprocess.Process, folder: str, limits: SandboxLimits, started: float
) -> RunStatus | None:
    """Wait for the process and end it where it passes a limit; returns that limit."""
    while True:
        left_s = started + limits.wall_s - time.monotonic()
        if left_s <= 0:
            _kill(process)
            return "timeout"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout=min(_WATCH_S, left_s))
            return None
        # A limit of the kernel holds per file only.
        if _size_of(folder) > limits.disk_mb * _MEGABYTE:
            _kill(process)
            return "disk"


def _status(exit_code: int, stderr: str) -> RunStatus:
    if exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "timeout"
    if exit_code == -signal.SIGXFSZ:
        return "disk"
    if exit_code and stderr.rstrip().endswith("MemoryError"):
        return "memory"
    return "failed" if exit_code else "finished"


async def _read_head(stream: asyncio.StreamReader, max_chars: int) -> str:
    """Read the stream to its end, so that the writer does not block, and keep the beginning."""
    kept, max_bytes = bytearray(), 4 * max_chars
    while chunk := await stream.read(65_536):
        if len(kept) < max_bytes:
            kept += chunk[: max_bytes - len(kept)]
    return kept.decode("utf-8", errors="replace")[:max_chars]


async def _feed(process: asyncio.subprocess.Process, stdin: str) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(stdin.encode("utf-8", errors="replace"))
        await process.stdin.drain()
    process.stdin.close()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _size_of(folder: str) -> int:
    size = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(path, file)).st_blocks * 512
    return size


class SandboxTool(BaseTool):
    """Runs the Python code that the policy writes, each call in a fresh process.

    Args:
        config: ``default_timeout`` (wall clock, seconds, 10); ``memory_limit_mb`` (1024); ``disk_limit_mb`` (64);
            ``max_output_chars`` (20000); ``num_workers`` (runs at a time in one worker, 10); ``isolation`` (``full`` or
            ``none``; without isolation the code may do whatever this process may).
        tool_schema: Default: ``code_interpreter(code: string)``.

    Raises:
        ValueError: For an unknown ``isolation``.
    """

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        isolation = self.config.get("isolation", "full")
        if isolation not in ("full", "none"):
            raise ValueError(f"config.isolation={isolation!r}: it must be 'full' or 'none'.")
        self.is_isolated = isolation == "full"
        self.limits = SandboxLimits(
            wall_s=float(self.config.get("default_timeout", 10.0)),
            memory_mb=int(self.config.get("memory_limit_mb", 1024)),
            disk_mb=int(self.config.get("disk_limit_mb", 64)),
            output_chars=int(self.config.get("max_output_chars", 20_000)),
        )
        if self.max_concurrency is None:
            self.max_concurrency = int(self.config.get("num_workers", 10))
        if self.timeout_s is None:
            # The sandbox's own limit answers first, with what was printed so far.
            self.timeout_s = self.limits.wall_s + 15.0

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema: ``code_interpreter(code: string)``."""
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(CODE_INTERPRETER_SCHEMA)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run ``parameters["code"]`` and return what it printed; metrics: ``status``, ``execution_time`` (seconds)."""
        result = await run_python(str(parameters.get("code", "")), limits=self.limits, is_isolated=self.is_isolated)
        text = result.stdout + result.stderr
        if result.status in ("timeout", "memory", "disk"):
            text = f"{text}\n[stopped: {result.status} limit]".lstrip()
        metrics = {"status": result.status, "execution_time": result.wall_s}
        return ToolResponse(text=text or _NO_OUTPUT), 0.0, metrics


CODE_INTERPRETER_SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run Python code in a fresh process and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}
