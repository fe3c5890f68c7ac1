"""Run reward functions in processes of their own, which are killed when their time is up.

The parent's side of ``score_process.py``; requests and answers are length-prefixed pickles over pipes. A process is
started with its first call and used until it is killed or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import struct
import sys
from typing import Any

from lit_rl.rewards.result import ScoreTimeout

HEADER = struct.Struct("!Q")
_START_TIMEOUT_S = 60.0


class ScoreProcessError(RuntimeError):
    """The function raised, or its process died; the message holds the traceback of the other side."""


class ScoreProcesses:
    """A few processes, each running one call at a time; calls beyond that wait.

    Args:
        functions: ``(importable name, keyword arguments)`` of each function; loaded once per process.
        num_processes: Calls at once, at least 1.
        timeout_s: Limit of one call in seconds, counted from its start.
    """

    def __init__(self, functions: list[tuple[str, dict[str, Any]]], num_processes: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._processes = [_Process(functions) for _ in range(num_processes)]
        self._idle: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        for process in self._processes:
            self._idle.put_nowait(process)

    async def call(self, index: int, arguments: dict[str, Any]) -> Any:
        """Return what function number ``index`` returns for the keyword arguments.

        Raises:
            ScoreTimeout: If it runs longer than the limit; its process group is killed.
            ScoreProcessError: If it raised, or if its process ended.
        """
        process = await self._idle.get()
        try:
            return await process.call(index, arguments, self._timeout_s)
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        """Kill all processes. Idempotent."""
        for process in self._processes:
            await process.kill()


class _Process:
    def __init__(self, functions: list[tuple[str, dict[str, Any]]]) -> None:
        self._functions = functions
        self._child: asyncio.subprocess.Process | None = None

    async def call(self, index: int, arguments: dict[str, Any], timeout_s: float) -> Any:
        is_clean = False
        try:
            if self._child is None:
                await self._start()
            self._send((index, arguments))
            try:
                async with asyncio.timeout(timeout_s):
                    has_raised, value = await self._receive()
            except TimeoutError:
                raise ScoreTimeout(timeout_s) from None
            is_clean = True
        finally:
            # Also on cancellation: a late answer would be taken for the next call's.
            if not is_clean:
                await self.kill()
        if has_raised:
            raise ScoreProcessError(value)
        return value

    async def _start(self) -> None:
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "lit_rl.rewards.score_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group of its own, so that what the function forks is killed with it
        )
        self._send((sys.path, self._functions))
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                has_raised, value = await self._receive()
        except TimeoutError:
            raise ScoreProcessError(f"A scoring process did not start within {_START_TIMEOUT_S:g} s.") from None
        if has_raised:
            raise ScoreProcessError(value)

    def _send(self, message: Any) -> None:
        assert self._child is not None
        assert self._child.stdin is not None
        payload = pickle.dumps(message)
        self._child.stdin.write(HEADER.pack(len(payload)) + payload)

    async def _receive(self) -> tuple[bool, Any]:
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            (size,) = HEADER.unpack(await self._child.stdout.readexactly(HEADER.size))
            return pickle.loads(await self._child.stdout.readexactly(size))
        except asyncio.IncompleteReadError:
            code = await self._child.wait()
            raise ScoreProcessError(
                f"The scoring process ended with exit code {code} (a negative one is a signal)."
            ) from None

    async def kill(self) -> None:
        """Kill the process and everything it has started."""
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await child.wait()
        child._transport.close()  # type: ignore[attr-defined]  # asyncio offers no public way to close both pipes
