"""A replica around vLLM's ``AsyncLLM``.

It lives in a worker process of its own (Ray) or in this one (inline); vLLM starts its engine core as a child process
either way. vllm is imported inside functions only: it takes 10 to 25 s and is not needed to parse a config.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from lit_rl.serving.replica import INITIAL_VERSION, WeightReport, check_score_request
from lit_rl.serving.settings import GIB, ServingSettings
from lit_rl.types import SamplingParams, ScoreOutput, StopReason, TokenOutput

_STOP_REASONS: dict[str | None, StopReason] = {"stop": "stop", "length": "length", "abort": "abort"}

_MAX_TOP_K = 128
"""Most candidates per token `VLLMReplica.score` may be asked for, unless ``engine_args`` set ``max_logprobs``."""


def replica_environment(settings: ServingSettings, rank: int, *, verbose: bool, gpu: bool) -> dict[str, str]:
    """Environment variables of the process that replica ``rank`` runs in; vLLM reads them when it is imported."""
    cores = settings.cores_of(rank)
    environment = {
        "VLLM_LOGGING_LEVEL": "INFO" if verbose else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_PLUGINS": "lit_rl",
    }
    if not gpu:
        environment |= {
            # Without an explicit list vLLM puts all of a replica's threads on one core of a small machine.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "OMP_NUM_THREADS": str(len(cores)),
            # The trainer and the replica share the cores in turn: an idle thread pool must sleep, not spin.
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "1",
        }
    return environment


class VLLMReplica:
    """One vLLM engine behind the `Replica` protocol."""

    def __init__(self, model: str, settings: ServingSettings, max_model_len: int, rank: int, gpu: bool) -> None:
        """Keep the settings; `start` loads the model.

        Args:
            model: Local folder or hub id.
            settings: How to serve.
            max_model_len: Longest prompt plus response in tokens.
            rank: Which replica this is.
            gpu: Whether the engine runs on a GPU.
        """
        self.model = model
        self.settings = settings
        self.max_model_len = max_model_len
        self.rank = rank
        self.gpu = gpu
        self.version = INITIAL_VERSION
        self.engine: Any = None

    async def start(self) -> None:
        """Start the engine and its weight-transfer engine."""
        from vllm import AsyncEngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments: dict[str, Any] = {
            "model": self.model,
            "dtype": self.settings.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.settings.max_num_seqs,
            "seed": self.settings.seed + self.rank,
            # What the log-probs must refer to: the distribution that was sampled from, after temperature.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": _MAX_TOP_K,
            "weight_transfer_config": WeightTransferConfig(backend="shared_memory"),
            "worker_extension_cls": "lit_rl.weight_sync.vllm_engine.WeightReportExtension",
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        if self.gpu:
            arguments["gpu_memory_utilization"] = self.settings.gpu_memory_utilization
            arguments["tensor_parallel_size"] = self.settings.tensor_parallel_size
        else:
            arguments["kv_cache_memory_bytes"] = int(self.settings.kv_cache_gib * GIB)
            arguments["block_size"] = self.settings.block_size
            # Compiling takes two minutes on two cores and gains nothing there.
            arguments["enforce_eager"] = True
        engine_args = AsyncEngineArgs(**(arguments | self.settings.engine_args))
        # The constructor blocks until the engine core is up: keep this worker's event loop free meanwhile.
        self.engine = await asyncio.get_running_loop().run_in_executor(None, AsyncLLM.from_engine_args, engine_args)
        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        """Sample one response; see `Replica.generate`."""
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as EngineSampling

        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens, but data.serving.max_model_len={self.max_model_len} leaves "
                "no room for a response. Raise it, or lower data.max_prompt_tokens so that such rows are filtered out."
            )
        engine_sampling = EngineSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, room),
            stop=sampling.stop or None,
            stop_token_ids=sampling.stop_token_ids or None,
            ignore_eos=sampling.ignore_eos,
            seed=sampling.seed,
            repetition_penalty=sampling.repetition_penalty,
            logprobs=0,  # of the sampled token only
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        completion = (await self._run(prompt_ids, engine_sampling, request_id)).outputs[0]
        token_ids = list(completion.token_ids)
        return TokenOutput(
            token_ids=token_ids,
            logprobs=[entry[token].logprob for entry, token in zip(completion.logprobs or [], token_ids, strict=True)],
            stop_reason=_STOP_REASONS.get(completion.finish_reason, "abort"),
            policy_versions=self._versions_per_token(completion.weight_versions, len(token_ids)),
        )

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], request_id: str, temperature: float = 1.0, top_k: int = 0
    ) -> ScoreOutput:
        """Score given tokens as a prompt; see `Replica.score`.

        vLLM gives a prompt's log-probs as a by-product of generating (at least one token), without temperature, and not
        for what it finds in its prefix cache, which such a request therefore does not read (0.32).
        """
        from vllm.sampling_params import RequestOutputKind
        from vllm.sampling_params import SamplingParams as EngineSampling

        check_score_request(prompt_ids, response_ids, temperature, top_k, self.max_model_len - 1)
        if temperature != 1.0:
            raise ValueError(
                f"score(temperature={temperature}): vLLM scores given tokens at temperature 1 only. Use 1, or "
                "serving.replica=transformers."
            )
        sampling = EngineSampling(
            temperature=0.0,
            max_tokens=1,  # sampled and ignored
            prompt_logprobs=top_k,
            flat_logprobs=True,
            skip_reading_prefix_cache=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        version = self.version
        output = await self._run([*prompt_ids, *response_ids], sampling, request_id)
        table = output.prompt_logprobs
        if table is None or len(table) != len(prompt_ids) + len(response_ids):
            raise ConnectionError(f"Replica {self.rank} ended a scoring request before it had read all its tokens.")
        # Each position's own token comes first, then the most likely ones.
        starts = table.start_indices[len(prompt_ids) :]
        return ScoreOutput(
            logprobs=[table.logprobs[start] for start in starts],
            top_ids=[table.token_ids[start + 1 : start + 1 + top_k] for start in starts] if top_k else [],
            top_logprobs=[table.logprobs[start + 1 : start + 1 + top_k] for start in starts] if top_k else [],
            policy_version=version,
        )

    async def _run(self, token_ids: list[int], sampling: Any, request_id: str) -> Any:
        """Have the engine process one request to its end."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs = [
                output async for output in self.engine.generate({"prompt_token_ids": token_ids}, sampling, request_id)
            ]
        except EngineDeadError as error:
            # Infrastructure, not data: the client goes to another replica.
            raise ConnectionError(f"The engine of replica {self.rank} has died.") from error
        return outputs[-1]

    def _versions_per_token(self, spans: Any, num_tokens: int) -> list[int]:
        """Expand vLLM's weight-version spans; a request that lived through a weight update has more than one."""
        versions = [self.version] * num_tokens
        for span in spans or []:
            label = int(span.version) if span.version.lstrip("-").isdigit() else INITIAL_VERSION
            versions[span.start : span.end] = [label] * (span.end - span.start)
        return versions

    async def abort(self, request_id: str) -> None:
        """End one request with what it has."""
        await self.engine.abort(request_id)

    async def pause(self) -> None:
        """Freeze generation and preempt the requests: no cache may outlive the weights it was computed with."""
        await self.engine.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        """Go on generating."""
        await self.engine.resume_generation()

    async def sleep(self) -> None:
        """Free weights and cache of a GPU that the trainer shares; a CPU engine keeps its own memory."""
        if self.gpu and self.settings.engine_args.get("enable_sleep_mode"):
            await self.engine.sleep(level=2)

    async def wake(self) -> None:
        """Take the memory back; the weights come with the next update."""
        if self.gpu and self.settings.engine_args.get("enable_sleep_mode"):
            await self.engine.wake_up()

    async def start_weight_update(self) -> None:
        """Begin a layer-wise reload."""
        await self.engine.start_weight_update()

    async def update_weights(self, bucket: dict[str, Any]) -> None:
        """Load one bucket of tensors."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.engine.update_weights(WeightTransferUpdateRequest(update_info={"path": bucket["path"]}))

    async def finish_weight_update(self, version: int) -> WeightReport:
        """Finish the reload, clear the prefix cache, and take the new version.

        Raises:
            RuntimeError: If the engine kept cached prefixes of the old weights.
        """
        await self.engine.finish_weight_update(weight_version=str(version))
        # Returns False, and does nothing, while a running request holds cache; `pause` has preempted them all.
        if not await self.engine.reset_prefix_cache():
            raise RuntimeError(
                f"Replica {self.rank} could not clear its prefix cache after the update to version {version}."
            )
        reports = await self.engine.collective_rpc("lit_rl_weight_report")
        self.version = version
        return WeightReport(
            version=version,
            bytes_received=reports[0]["bytes_received"],
            checksum="-".join(report["checksum"] for report in reports),
        )

    async def health(self) -> dict[str, Any]:
        """Raise when the engine core has died; else say which version is served."""
        await self.engine.check_health()
        return {"version": self.version, "engine_pids": engine_pids()}

    async def close(self) -> None:
        """Stop the engine core and its processes."""
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None


def engine_pids() -> list[int]:
    """Process ids of the engine core and its helpers: the children of this process."""
    import psutil

    return [child.pid for child in psutil.Process(os.getpid()).children(recursive=True)]
