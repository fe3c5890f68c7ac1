"""Namespaces around the sandbox process, where the program ``bwrap`` is installed and may be used.

One more layer in front of `lit_rl.tools.sandbox_child`: the process sees no file but the given ones, no network device,
no other process, and it ends with the one that started it.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence

_PROBE_TIMEOUT_S = 10.0
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def bubblewrap_prefix(readable: Sequence[str], writable: str) -> list[str]:
    """Return what to put in front of a command; empty where bubblewrap is missing or not allowed.

    Args:
        readable: Files and folders that the command may read.
        writable: The folder that it runs in and may write to.
    """
    program = _find()
    if program is None:
        return []
    prefix = [program, "--unshare-all", "--die-with-parent", "--tmpfs", "/tmp"]
    for path in sorted(path for path in {*readable} if not path.startswith("/dev/")):
        prefix += ["--ro-bind-try", path, path]
    for path in _DEVICES:
        prefix += ["--dev-bind-try", path, path]
    return [*prefix, "--bind", writable, writable, "--chdir", writable, "--"]


def exit_code_of(status: int) -> int:
    """Return a wrapped command's exit status as `subprocess` gives it: negative for a signal."""
    return 128 - status if status > 128 else status


@functools.cache
def _find() -> str | None:
    """Path of bubblewrap; containers often have it without the right to make namespaces."""
    program = shutil.which("bwrap")
    if program is None:
        return None
    command = [
        program,
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        shutil.which("true") or "/bin/true",
    ]
    try:
        probe = subprocess.run(
            command, timeout=_PROBE_TIMEOUT_S, check=False, env={"PATH": os.defpath}, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return program if probe.returncode == 0 else None
