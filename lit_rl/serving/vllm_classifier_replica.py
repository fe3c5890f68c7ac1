"""A replica of a discriminative reward model: a sequence classifier on vLLM's pooling runner.

The counterpart of `lit_rl.serving.vllm_replica`, for models that read and do not write. vllm is imported inside
functions only.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from lit_rl.serving.replica import INITIAL_VERSION
from lit_rl.serving.settings import GIB, ServingSettings
from lit_rl.serving.vllm_replica import engine_pids


class VLLMClassifierReplica:
    """One vLLM engine with ``classify``, see `TransformersClassifierReplica`."""

    def __init__(self, model: str, settings: ServingSettings, max_model_len: int, rank: int, gpu: bool) -> None:
        """Keep the settings; `start` loads the model. Arguments as in `VLLMReplica`."""
        self.model = model
        self.settings = settings
        self.max_model_len = max_model_len
        self.rank = rank
        self.gpu = gpu
        self.engine: Any = None

    async def start(self) -> None:
        """Start the engine."""
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, Any] = {
            "model": self.model,
            "runner": "pooling",
            "dtype": self.settings.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.settings.max_num_seqs,
            "seed": self.settings.seed + self.rank,
            "disable_log_stats": True,
        }
        if self.gpu:
            arguments["gpu_memory_utilization"] = self.settings.gpu_memory_utilization
            arguments["tensor_parallel_size"] = self.settings.tensor_parallel_size
        else:
            arguments["kv_cache_memory_bytes"] = int(self.settings.kv_cache_gib * GIB)
            arguments["block_size"] = self.settings.block_size
            arguments["enforce_eager"] = True  # compiling takes minutes on a few cores and gains nothing there
        engine_args = AsyncEngineArgs(**(arguments | self.settings.engine_args))
        # The constructor blocks until the engine core is up: keep this worker's event loop free meanwhile.
        self.engine = await asyncio.get_running_loop().run_in_executor(None, AsyncLLM.from_engine_args, engine_args)

    async def classify(self, token_ids: list[int]) -> list[float]:
        """Return the classifier's outputs for one conversation, before any activation.

        Args:
            token_ids: The whole conversation.

        Raises:
            ValueError: If it is empty or longer than the engine takes.
            ConnectionError: If the engine has died.
        """
        from vllm import PoolingParams
        from vllm.v1.engine.exceptions import EngineDeadError

        params = PoolingParams(task="classify", use_activation=False)
        try:
            outputs = [
                output async for output in self.engine.encode({"prompt_token_ids": token_ids}, params, uuid.uuid4().hex)
            ]
        except EngineDeadError as error:
            raise ConnectionError(f"The engine of reward model replica {self.rank} has died.") from error
        return [float(value) for value in outputs[-1].outputs.data.flatten().tolist()]

    async def health(self) -> dict[str, Any]:
        """Raise when the engine core has died; else say which version is served."""
        await self.engine.check_health()
        return {"version": INITIAL_VERSION, "engine_pids": engine_pids()}

    async def close(self) -> None:
        """Stop the engine core and its processes."""
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None
