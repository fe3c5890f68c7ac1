from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from tagged_run import TaggedRun


@pytest.fixture(autouse=True, scope="session")
def one_thread_and_no_hub() -> Iterator[None]:
    """Small tensors gain nothing from more threads, and sums come out the same every time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield
    torch.set_num_threads(threads)
    if before is None:
        del os.environ["HF_HUB_OFFLINE"]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """After the test: no child process, no thread of ours, no weights in shared memory that were not there before."""
    before = _ours()
    yield
    deadline = time.monotonic() + 5.0
    while (left := _ours() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == set()


def _ours() -> set[str]:
    children = {str(child.pid) for child in psutil.Process().children(recursive=True)}
    # A session-wide fixture of another file may hold a runtime of its own.
    threads = {f"{thread.name} {thread.ident}" for thread in threading.enumerate() if thread.name.startswith("lit_rl")}
    return children | threads | {str(path) for path in Path("/dev/shm").glob(f"lit_rl_weights_{os.getpid()}_*")}


@pytest.fixture
def lit_rl(tmp_path: Path) -> Iterator[Callable[..., TaggedRun]]:
    """Start ``lit-rl ARGS`` in a process of its own, in ``tmp_path``; whatever is left of it is ended with the test."""
    runs: list[TaggedRun] = []

    def start(*args: str, env: dict[str, str] | None = None) -> TaggedRun:
        runs.append(TaggedRun(args, tmp_path, env))
        return runs[-1]

    yield start
    for run in runs:
        run.end()
