"""Shares through Ray's object store: what arrives, and that nothing of it stays."""

from __future__ import annotations

import os
import time

import pytest
import torch
from ranks import run_on_ranks

NUM_ITERATIONS, SHARE_MB = 20, 8


def exchange_many(num_iterations: int) -> dict[str, list[float]]:
    """What a rank does: rank 0 sends an array per iteration, the other reads it and lets go of it."""
    import numpy as np

    from lit_rl.cluster import ProcessIdentity, Runtime
    from lit_rl.experience.exchange import exchange_of_rank, exchange_of_rank_zero

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    place: list = [None]
    if rank == 0:
        runtime = Runtime("ray", num_cpus=1)
        runtime.start()
        exchange = exchange_of_rank_zero(runtime, 2, ProcessIdentity.current())
        place = [(runtime.address, runtime.namespace, ProcessIdentity.current())]
    torch.distributed.broadcast_object_list(place)
    if rank > 0:
        address, namespace, identity = place[0]
        runtime = Runtime("ray", address=address, namespace=namespace)
        exchange = exchange_of_rank(runtime, rank, identity, 120.0)
    seen, used = [], []
    for iteration in range(num_iterations):
        array = np.full(SHARE_MB << 17, iteration, dtype=np.float64)
        part = exchange.scatter(f"iteration {iteration}", lambda array=array: [None, array])
        seen.append(-1.0 if part is None else float(part.mean()))
        del part
        torch.distributed.barrier()
        if rank == 0 and iteration % 5 == 4:  # waiting for Ray costs a second or two
            used.append(settled_mb())
    exchange.close()
    if rank > 0:
        runtime.stop()
    torch.distributed.barrier()
    if rank == 0:
        runtime.stop()
    return {"seen": seen, "used": used}


def settled_mb() -> float:
    """What the object store holds once Ray has freed what nobody refers to, which it does now and then."""
    deadline = time.monotonic() + 10.0
    while (used := object_store_mb()) > 1.5 * SHARE_MB and time.monotonic() < deadline:
        time.sleep(0.1)
    return used


def object_store_mb() -> float:
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address
    from ray._private.worker import global_worker

    reply = get_memory_info_reply(get_state_from_address(global_worker.gcs_client.address))
    return float(reply.store_stats.object_store_bytes_used) / 1e6


def test_every_iteration_arrives_and_the_object_store_stays_flat() -> None:  # design D7
    zero, one = run_on_ranks(exchange_many, 2, NUM_ITERATIONS, timeout_s=240)

    assert one["seen"] == [float(iteration) for iteration in range(NUM_ITERATIONS)]
    assert zero["seen"] == [-1.0] * NUM_ITERATIONS
    # The one that was posted last is there, and no other.
    assert zero["used"] == [pytest.approx(SHARE_MB, rel=0.1)] * (NUM_ITERATIONS // 5)
