"""Run a function on several ranks at once: processes that a server forks once it has imported everything.

Importing torch, Lightning and transformers takes ten seconds per process, forking a server that has them none. The
server is clean: it has run no computation, so nothing of the test process leaks into the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

_PRELOAD = ["torch", "lightning", "transformers.models.llama.modeling_llama", "lit_rl.modules", "lit_rl.strategies"]
_TIMEOUT_S = 300.0


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = _TIMEOUT_S) -> list[Any]:
    """Call ``function(*args)`` on every rank and return the results in the order of ranks.

    Lightning finds the ranks in the environment, as torchrun gives them. ``function`` is importable by name.
    """
    port = _free_port()
    context = _context()
    ranks = []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, function, args, rank, world_size, port), daemon=True)
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return [_result(process, pipe, timeout_s) for process, pipe in ranks]
    finally:
        for process, _ in ranks:
            process.kill()
            process.join(10)


def _result(process: Any, pipe: Any, timeout_s: float) -> Any:
    assert pipe.poll(timeout_s), f"{process.name}: no result within {timeout_s:g} s"
    try:
        result, error = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        process.join(10)
        raise AssertionError(f"{process.name} ended with {process.exitcode} and no result") from None
    assert error is None, error
    return result


def _serve(pipe: Any, function: Callable[..., Any], args: Sequence[Any], rank: int, world_size: int, port: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1",
    }
    try:
        answer = function(*args), None
    except BaseException:
        answer = None, f"rank {rank}:\n{traceback.format_exc()}"
    # Plainly: multiprocessing's own way hands tensors over by file descriptor, while the sender lives.
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    with contextlib.suppress(Exception):
        # Rank 0 keeps the store that the others say good-bye to.
        torch.distributed.barrier()
    os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
