"""How the replicas are started: how many, on which cores, with how much memory.

Nothing here is guessed from what happens to be free: each replica gets the cores, threads and cache it is told to use.
"""

from __future__ import annotations

import importlib
import math
import os
from dataclasses import dataclass, field
from typing import Any

GIB = 1 << 30
REPLICA_CLASSES = {
    "vllm": "lit_rl.serving.vllm_replica.VLLMReplica",
    "transformers": "lit_rl.serving.transformers_replica.TransformersReplica",
}
"""Short names of ``data.serving.replica``."""


@dataclass(kw_only=True)
class ServingSettings:
    """Settings of the replicas that sample from the policy.

    Attributes:
        replica: ``vllm``, ``transformers``, or the dotted path of a class that implements
            `lit_rl.serving.replica.Replica`.
        num_replicas: Engines of their own, each holding the whole model; at least 1.
        dtype: Weights and activations of the engine: ``bfloat16``, ``float16`` or ``float32``.
        max_model_len: Longest prompt plus response in tokens; ``null`` takes ``max_prompt_tokens +
            max_response_tokens`` of the data.
        max_num_seqs: Most sequences an engine runs at once; the rest wait in its queue.
        kv_cache_gib: Key-value cache of each CPU replica in GiB. On GPUs ``gpu_memory_utilization`` decides.
        threads_per_replica: Cores (and threads) of each CPU replica; 0 divides the machine's cores evenly between
            replicas.
        first_core: Replica ``r`` is bound to the cores from ``first_core + r * threads_per_replica`` on, modulo those
            allowed.
        block_size: Tokens per cache block. Small blocks let a second turn find more of the first in the prefix cache.
        gpu_memory_utilization: Share of a GPU's memory an engine takes, in (0, 1].
        tensor_parallel_size: GPUs of one replica.
        seed: Seed of the engines; replica ``r`` gets ``seed + r``.
        start_timeout_s: Longest wait for an engine to start, in seconds.
        request_timeout_s: Longest wait for one generation, in seconds.
        weight_update_timeout_s: Longest wait for one step of a weight update, in seconds.
        weight_bucket_mib: Size of the buckets weights travel in, in MiB.
        engine_args: Further vLLM engine arguments, passed on as they are.
    """

    replica: str = "vllm"
    num_replicas: int = 1
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    kv_cache_gib: float = 1.0
    threads_per_replica: int = 0
    first_core: int = 0
    block_size: int = 32
    gpu_memory_utilization: float = 0.5
    tensor_parallel_size: int = 1
    seed: int = 0
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    weight_update_timeout_s: float = 120.0
    weight_bucket_mib: int = 128
    engine_args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what can be checked before anything starts."""
        for name in ("num_replicas", "max_num_seqs", "max_model_len", "block_size", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.serving.{name}={value} must be at least 1.")
        for name in ("start_timeout_s", "request_timeout_s", "weight_update_timeout_s", "weight_bucket_mib"):
            if not getattr(self, name) > 0:  # NaN is refused too: nothing would ever time out
                raise ValueError(f"data.serving.{name}={getattr(self, name)} must be above 0.")
        for name in ("first_core", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"data.serving.{name}={getattr(self, name)} must be 0 or more.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"data.serving.gpu_memory_utilization={self.gpu_memory_utilization} must be in (0, 1].")
        if self.dtype not in ("bfloat16", "float32", "float16"):
            raise ValueError(f"data.serving.dtype={self.dtype!r} must be bfloat16, float16 or float32.")
        if not 0 < self.kv_cache_gib < math.inf:
            raise ValueError(f"data.serving.kv_cache_gib={self.kv_cache_gib} must be above 0 (GiB).")
        if self.threads_per_replica < 0:
            raise ValueError(
                f"data.serving.threads_per_replica={self.threads_per_replica} must be 0 (divide evenly) or more."
            )
        if self.replica not in REPLICA_CLASSES:
            load_class(self.replica)

    def cores_of(self, replica_rank: int) -> list[int]:
        """Cores that replica ``replica_rank`` is bound to, among those this process may use."""
        allowed = sorted(os.sched_getaffinity(0))
        count = self.threads_per_replica or max(1, len(allowed) // self.num_replicas)
        start = self.first_core + replica_rank * count
        return sorted({allowed[(start + i) % len(allowed)] for i in range(min(count, len(allowed)))})


def load_class(path: str) -> type:
    """Import a class by its dotted path.

    Args:
        path: Of a class that implements `lit_rl.serving.replica.Replica`.

    Raises:
        ValueError: If there is no such class.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"data.serving.replica={path!r} is neither one of {sorted(REPLICA_CLASSES)} nor the path of a class: "
            f"{error}"
        ) from error
    # A language model generates, a classifier of `lit_rl.rewards` classifies.
    if not isinstance(found, type) or not (hasattr(found, "generate") or hasattr(found, "classify")):
        raise ValueError(
            f"data.serving.replica={path!r} is no class with the methods of lit_rl.serving.replica.Replica."
        )
    return found
