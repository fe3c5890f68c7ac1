"""The retrieval server as a child process: started, waited for, and ended with whoever started it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SERVER = Path(__file__).with_name("retrieval_server.py")


@contextmanager
def serving(arguments: Sequence[str], log_path: Path, start_timeout_s: float = 300.0) -> Iterator[str]:
    """Serve on a free port while the block runs; yields the address of the retrieve endpoint.

    Args:
        arguments: Options of retrieval_server.py.
        log_path: Where its output goes.
        start_timeout_s: Longest wait until it answers.

    Raises:
        RuntimeError: If it ends or does not answer in time; the message has its last lines.
    """
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(SERVER), *arguments, "--port", "0"], stdout=log, stderr=subprocess.STDOUT
        )
        try:
            yield _wait_until_it_answers(process, log_path, start_timeout_s)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_tools_file(path: Path, url: str, topk: int) -> None:
    """Write the tool configuration of a search tool in front of this server."""
    config = {"type": "native", "retrieval_service_url": url, "topk": topk, "timeout": 30, "deadline_s": 60}
    path.write_text(
        json.dumps({"tools": [{"class_name": "lit_rl.tools.search_tool.SearchTool", "config": config}]}, indent=2)
    )


def _wait_until_it_answers(process: subprocess.Popen[bytes], log_path: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        url = next((line.split(": ")[0] for line in log_path.read_text().splitlines() if line.startswith("http")), None)
        if url is not None:
            try:
                with urllib.request.urlopen(url.replace("/retrieve", "/health"), timeout=5):
                    return url
            except (urllib.error.URLError, OSError):
                pass  # bound, and not listening yet
        time.sleep(0.1)
    what = f"did not answer within {timeout_s:g} s" if process.poll() is None else f"ended with {process.returncode}"
    last = "\n".join(log_path.read_text().splitlines()[-5:])
    raise RuntimeError(f"The retrieval server {what}; its last lines in {log_path}:\n{last}")
