"""How often the bytes of an experience are copied on its way from rank 0 to four ranks: 1,024 x 2,048 tokens.

Rank 0 is this process, the other three are processes of their own on the same Ray. Counted as copies: the flat arrays
that rank 0 makes of a share, the object store, and whatever a receiving rank holds of its own afterwards (its private
memory, which the object store is not part of). No rank but rank 0, which has collected it, ever holds the whole.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from lit_rl.cluster import ProcessIdentity, Runtime
from lit_rl.experience.exchange import exchange_of_rank, exchange_of_rank_zero
from lit_rl.experience.share import PlanSettings, Rollout, SequenceScalars
from lit_rl.types import Trajectory

WORLD_SIZE, NUM_SEQUENCES, NUM_TOKENS, GROUP_SIZE = 4, 1024, 2048, 8
PROMPT_TOKENS = 64
BYTES_PER_TOKEN = 13  # id 4, mask 1, log-prob 4, version 4
SETTINGS = PlanSettings(max_tokens=8192)
TIMEOUT_S = 300.0


def make_rollout() -> Rollout:
    rng = random.Random(0)
    sequences = []
    prompt: list[int] = []
    for number in range(NUM_SEQUENCES):
        if number % GROUP_SIZE == 0:
            prompt = [rng.randrange(150_000) for _ in range(PROMPT_TOKENS)]
        length = NUM_TOKENS - PROMPT_TOKENS
        sequences.append(
            Trajectory(
                row_id=str(number // GROUP_SIZE), group_id=str(number // GROUP_SIZE), prompt_ids=prompt,
                response_ids=[rng.randrange(150_000) for _ in range(length)], loss_mask=[1] * length,
                rollout_logprobs=[rng.random() for _ in range(length)], policy_versions=[0] * length, reward=0.0,
            )
        )  # fmt: skip
    groups = [number // GROUP_SIZE for number in range(NUM_SEQUENCES)]
    scalars = SequenceScalars(
        iteration=0, temperature=1.0, plan_seed=0, lengths=[t.length for t in sequences],
        prompt_lengths=[PROMPT_TOKENS] * NUM_SEQUENCES, loss_tokens=[t.num_loss_tokens for t in sequences],
        rewards=[0.0] * NUM_SEQUENCES, group_ids=groups, prompt_groups=groups, greedy_rewards=None, metrics={},
    )  # fmt: skip
    return Rollout(scalars=scalars, sequences=sequences)


def receive(rank: int, address: str, namespace: str, identity: list, ready: Path) -> None:
    """Another rank: take the share, make the experience, and print what it holds."""
    runtime = Runtime("ray", address=address, namespace=namespace)
    exchange = exchange_of_rank(runtime, rank, ProcessIdentity(*identity), TIMEOUT_S)
    exchange.scatter("a first exchange", list)  # whatever is loaded once, is loaded now
    gc.collect()
    before = psutil.Process().memory_full_info().uss
    ready.touch()
    share = exchange.scatter("the experience", list)
    experience = share.experience(SETTINGS, WORLD_SIZE)
    gc.collect()
    grown = psutil.Process().memory_full_info().uss - before
    print(json.dumps({"grown": grown, "received": share.trajectories.num_bytes, "held": len(experience)}), flush=True)
    runtime.stop()


def run() -> dict[str, float]:
    rollout = make_rollout()
    whole = NUM_SEQUENCES * (NUM_TOKENS - PROMPT_TOKENS) * BYTES_PER_TOKEN
    with tempfile.TemporaryDirectory() as folder, Runtime("ray", num_cpus=1) as runtime:
        identity = ProcessIdentity.current()
        exchange = exchange_of_rank_zero(runtime, WORLD_SIZE, identity)
        place = [runtime.address, runtime.namespace, json.dumps([identity.host, identity.pid, identity.create_time])]
        ready = [Path(folder) / str(rank) for rank in range(1, WORLD_SIZE)]
        others = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), *place, str(ready[rank - 1])], stdout=subprocess.PIPE, text=True
            )
            for rank in range(1, WORLD_SIZE)
        ]
        exchange.scatter("a first exchange", lambda: [None] * WORLD_SIZE)
        asyncio.run(asyncio.wait_for(_all_there(ready), TIMEOUT_S))
        exchange.scatter("the experience", lambda: rollout.deal(SETTINGS, WORLD_SIZE))
        reports = [json.loads(other.communicate(timeout=TIMEOUT_S)[0].splitlines()[-1]) for other in others]
        exchange.close()
    received = [report["received"] for report in reports]
    assert sum(report["held"] for report in reports) < NUM_SEQUENCES
    assert all(isinstance(one, int) and one < whole / 2 for one in received), "a rank held half of it, or more"
    # Once flat on rank 0, once in the object store, and what receivers made of it.
    copied = 2 * sum(received) + sum(max(report["grown"], 0) for report in reports)
    return {"scatter_copies_ratio": copied / whole, "scatter_largest_share": max(received) / whole}


async def _all_there(files: list[Path]) -> None:
    while not all(file.exists() for file in files):
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        receive(int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), Path(sys.argv[5]))
    else:
        for name, value in run().items():
            print(f"{name}: {value:.4f}")
