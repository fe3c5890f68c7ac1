"""Ends what a killed process leaves behind: the daemons of a driver's cluster, and the children of a worker.

Ray's own daemons end with their driver, except two agents: those try for a minute to report the death to a server
that is gone; and its workers end with their daemon, before they could end a process they have started (Ray 2.60). A
guardian is a shell that waits for its process's end of a pipe to close.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Arguments are pairs of pid and start time, so that a reused pid is left alone.
_SCRIPT = """
read -r _
while [ $# -gt 1 ]; do
    [ "$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20)" = "$2" ] && kill -9 "$1" 2>/dev/null
    shift 2
done
"""

# In POSIX's form: dash refuses `kill -9 -- -GROUP`.
_GROUP_SCRIPT = 'read -r _; kill -s KILL -- "-$1" 2>/dev/null'


class Guardian:
    """Kills processes if this process ends without calling `stop`. Linux only; elsewhere it does nothing."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._shell: subprocess.Popen[bytes] | None = None
        arguments = [argument for pid in pids for argument in _start_of(pid)]
        if sys.platform == "linux" and arguments:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "lit_rl-guardian", *arguments],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the driver
            )

    def stop(self) -> None:
        """Dismiss the guardian; the processes live on. Idempotent."""
        shell, self._shell = self._shell, None
        if shell is not None:
            shell.kill()
            shell.wait(5.0)
            assert shell.stdin is not None
            shell.stdin.close()


def guard_children() -> subprocess.Popen[bytes]:
    """Have the processes below this one killed when it ends, however it ends.

    This process becomes the leader of a process group; children that leave the group are not followed.

    Returns:
        The guardian. It acts when this object is gone, so keep it.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    return subprocess.Popen(
        ["/bin/sh", "-c", _GROUP_SCRIPT, "lit_rl-guardian", str(os.getpid())],
        stdin=subprocess.PIPE,
        start_new_session=True,  # not in the group it ends
    )


def _start_of(pid: int) -> list[str]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name in parentheses may contain spaces; the start time is field 22, the 20th after it.
    return [str(pid), stat.rpartition(") ")[2].split()[19]]
