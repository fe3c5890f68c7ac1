"""The process that runs reward functions with ``isolation: process``; started by ``processes.py``, never imported.

Reads requests from stdin and writes answers to what was stdout; the functions' own prints go to stderr. It ends with
its parent, even in the middle of a call.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import pickle
import signal
import sys
import traceback
from typing import Any, BinaryIO

from lit_rl.rewards.functions import RewardFunction, load_reward_function
from lit_rl.rewards.processes import HEADER

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MAX_TRACEBACK_CHARS = 4000


def main() -> None:
    """Serve requests until stdin is closed."""
    if sys.platform == "linux":
        # A function that never ends would not notice that its parent is gone.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    first = _read(requests)
    if first is None:
        return
    search_path, specs = first
    sys.path[:] = search_path
    try:
        functions = [load_reward_function(spec, kwargs) for spec, kwargs in specs]
    except BaseException:
        _write(answers, (True, traceback.format_exc()[-_MAX_TRACEBACK_CHARS:]))
        return
    _write(answers, (False, None))
    while (request := _read(requests)) is not None:
        index, arguments = request
        _write(answers, _run(functions[index], arguments))


def _run(function: RewardFunction, arguments: dict[str, Any]) -> tuple[bool, Any]:
    try:
        value = function.call(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        pickle.dumps(value)
        return False, value
    except BaseException:
        return True, traceback.format_exc()[-_MAX_TRACEBACK_CHARS:]


async def _await(value: Any) -> Any:
    return await value


def _read(stream: BinaryIO) -> Any:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def _write(stream: BinaryIO, message: Any) -> None:
    payload = pickle.dumps(message)
    stream.write(HEADER.pack(len(payload)) + payload)
    stream.flush()


if __name__ == "__main__":
    main()
