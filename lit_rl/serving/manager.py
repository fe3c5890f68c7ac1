"""The replicas of a run as one object of the trainer process: start, weight updates, and clients for agent loops.

Everything here is asynchronous and runs on the runtime's event loop. Weights come as buckets that somebody else has
written (`lit_rl.callbacks.WeightSync` with `lit_rl.weight_sync`); this module knows the order of an update, not where
tensors come from.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any

from lit_rl.cluster import Runtime, WorkerGroup, WorkerHandle
from lit_rl.serving.client import LLMServerClient
from lit_rl.serving.load_balancer import LoadBalancer
from lit_rl.serving.replica import INITIAL_VERSION, WeightReport
from lit_rl.serving.settings import REPLICA_CLASSES, ServingSettings, load_class
from lit_rl.serving.vllm_replica import replica_environment
from lit_rl.types import ScoreOutput

log = logging.getLogger(__name__)

_UNKNOWN_VERSION = -2
"""Version of a replica in the middle of a weight update, or after one that failed."""


class EngineStartFailed(RuntimeError):
    """A replica did not come up; the message is the engine's own."""


class WeightUpdateFailed(RuntimeError):
    """A replica failed, timed out, or holds other weights than were sent."""


class LLMServerManager:
    """Starts the replicas, keeps their versions, and hands out clients."""

    def __init__(
        self,
        runtime: Runtime,
        settings: ServingSettings,
        model: str,
        max_model_len: int,
        *,
        gpu: bool,
        verbose: bool = False,
        prefix: str = "",
    ) -> None:
        """Keep what is needed; `start` starts the engines.

        Args:
            runtime: Where replicas run.
            settings: How many and how.
            model: Local folder or hub id every replica loads.
            max_model_len: Longest prompt plus response in tokens.
            gpu: Whether each replica takes GPUs.
            verbose: Show the engines' own logs.
            prefix: Of the workers' names, where a runtime holds more than one manager.
        """
        self.runtime = runtime
        self.settings = settings
        self.model = model
        self.max_model_len = max_model_len
        self.gpu = gpu
        self.verbose = verbose
        self.prefix = prefix
        self.versions: dict[str, int] = {}
        self.replicas: WorkerGroup | None = None
        self._balancer: WorkerGroup | None = None
        self._checksum = ""
        self._previous_checksum = ""

    async def start(self) -> None:
        """Start all replicas at once, then the load balancer.

        Raises:
            EngineStartFailed: With the engine's own words, after every process started so far is gone.
        """
        count = self.settings.num_replicas
        self.replicas = WorkerGroup.create(
            self.runtime,
            load_class(REPLICA_CLASSES.get(self.settings.replica, self.settings.replica)),
            count,
            name=f"{self.prefix}replica",
            kwargs={
                "model": self.model,
                "settings": self.settings,
                "max_model_len": self.max_model_len,
                "gpu": self.gpu,
            },
            per_rank_kwargs=[{"rank": rank} for rank in range(count)],
            num_gpus=float(self.settings.tensor_parallel_size if self.gpu else 0),
            env=[
                dict(replica_environment(self.settings, rank, verbose=self.verbose, gpu=self.gpu))
                for rank in range(count)
            ],
        )
        timeout_s = self.settings.start_timeout_s
        try:
            await self.replicas.ready(timeout_s)
            await self._on_all("start", timeout_s=timeout_s)
            names = [worker.name for worker in self.replicas.workers]
            self._balancer = WorkerGroup.create(
                self.runtime,
                LoadBalancer,
                1,
                name=f"{self.prefix}load_balancer",
                kwargs={"servers": names},
                env={"OMP_NUM_THREADS": "1"},
                restarts=True,
            )
            await self._balancer.ready(60.0)
        except Exception as error:
            await self.stop()
            raise EngineStartFailed(
                f"A replica (data.serving.replica={self.settings.replica}) did not start with model {self.model!r}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self.versions = dict.fromkeys(names, INITIAL_VERSION)

    def client(self) -> LLMServerClient:
        """A light client, which can be pickled into agent workers."""
        if self.replicas is None or self._balancer is None:
            raise RuntimeError("LLMServerManager.client() was called before start().")
        return LLMServerClient(
            balancer=self._balancer.workers[0],
            replicas={worker.name: worker for worker in self.replicas.workers},
            request_timeout_s=self.settings.request_timeout_s,
        )

    def require_version(self, version: int, iteration: int) -> None:
        """Refuse to collect with other weights than the iteration's.

        Raises:
            RuntimeError: Unless every replica has acknowledged ``version``.
        """
        held = sorted(set(self.versions.values()))
        if held != [version]:
            names = {INITIAL_VERSION: "the weights they were started with", _UNKNOWN_VERSION: "a half-finished update"}
            shown = ", ".join(names.get(number, f"version {number}") for number in held)
            raise RuntimeError(
                f"The replicas hold {shown}, iteration {iteration} needs version {version}: "
                "is the WeightSync callback in trainer.callbacks?"
            )

    async def begin_weight_update(self) -> None:
        """Pause generation on every replica, then open the update."""
        # From the first bucket on, until the end is acknowledged, nobody holds a version.
        self.versions = dict.fromkeys(self.versions, _UNKNOWN_VERSION)
        await self._on_all("pause")
        await self._on_all("wake")
        await self._on_all("start_weight_update")

    async def send_bucket(self, bucket: dict[str, Any]) -> None:
        """Have every replica load one bucket; returns when all have."""
        await self._on_all("update_weights", bucket)

    async def finish_weight_update(self, version: int, bytes_sent: dict[str, int]) -> None:
        """Close the update, verify it, take the version, and resume generation.

        Args:
            version: Policy version of the weights that were sent.
            bytes_sent: Bytes sent under each name.

        Raises:
            WeightUpdateFailed: If a replica received other names or sizes than were sent, or two replicas differ.
        """
        reports: list[WeightReport] = await self._on_all("finish_weight_update", version)
        assert self.replicas is not None
        names = [worker.name for worker in self.replicas.workers]
        for name, report in zip(names, reports, strict=True):
            _check_report(name, report, bytes_sent)
        checksums = {name: report.checksum for name, report in zip(names, reports, strict=True)}
        if len(set(checksums.values())) > 1:
            raise WeightUpdateFailed(
                f"After the update to version {version} the replicas hold different weights: {checksums}."
            )
        self._previous_checksum, self._checksum = self._checksum, reports[0].checksum
        self.versions = {name: report.version for name, report in zip(names, reports, strict=True)}
        await self._on_all("resume")

    @property
    def weights_changed(self) -> bool:
        """Whether the last update left other weights in the engines than the one before."""
        return self._checksum != self._previous_checksum

    async def score(
        self, sequences: list[tuple[list[int], list[int]]], *, temperature: float = 1.0
    ) -> dict[str, list[ScoreOutput]]:
        """Have every replica score the same sequences, to compare them: whoever wants an answer asks a `client`.

        Args:
            sequences: Prompt and response ids of each; see `Replica.score`.
            temperature: Divides the logits.

        Returns:
            One answer per sequence under each replica's name.

        Raises:
            Exception: The first replica's that failed, as it is.
        """
        assert self.replicas is not None
        timeout_s = self.settings.request_timeout_s

        async def ask(worker: WorkerHandle) -> list[ScoreOutput]:
            calls = [
                worker.call("score", prompt_ids, response_ids, uuid.uuid4().hex, temperature, timeout_s=timeout_s)
                for prompt_ids, response_ids in sequences
            ]
            return await asyncio.gather(*calls)

        workers = self.replicas.workers
        answers = await asyncio.gather(*(ask(worker) for worker in workers))
        return {worker.name: answer for worker, answer in zip(workers, answers, strict=True)}

    async def health(self) -> list[dict[str, Any]]:
        """Ask every replica; raises when one has died."""
        result: list[dict[str, Any]] = await self._on_all("health", timeout_s=30.0)
        return result

    async def stop(self) -> None:
        """Stop replicas and balancer with all their processes; safe to call twice."""
        groups = [group for group in (self.replicas, self._balancer) if group is not None]
        self.replicas = self._balancer = None
        await asyncio.gather(*(group.stop(timeout_s=15.0) for group in groups))

    async def _on_all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method on every replica at once.

        Raises:
            WeightUpdateFailed: During updates, naming every replica that failed; the first error otherwise.
        """
        assert self.replicas is not None
        timeout_s = timeout_s or self.settings.weight_update_timeout_s
        workers: list[WorkerHandle] = self.replicas.workers
        results = await asyncio.gather(
            *(worker.call(method, *arguments, timeout_s=timeout_s) for worker in workers), return_exceptions=True
        )
        failed = {w.name: r for w, r in zip(workers, results, strict=True) if isinstance(r, BaseException)}
        if not failed:
            return list(results)
        first = next(iter(failed.values()))
        if method in ("start", "health") or isinstance(first, asyncio.CancelledError):
            raise first
        told = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failed.items())
        raise WeightUpdateFailed(f"{method} failed on {len(failed)} of {len(workers)} replicas: {told}") from first


def _check_report(name: str, report: WeightReport, bytes_sent: dict[str, int]) -> None:
    """Raise unless a replica received exactly what was sent."""
    missing = sorted(set(bytes_sent) - set(report.bytes_received))
    extra = sorted(set(report.bytes_received) - set(bytes_sent))
    wrong = sorted(n for n in set(bytes_sent) & set(report.bytes_received) if bytes_sent[n] != report.bytes_received[n])
    if missing or extra or wrong or report.unused_names:
        raise WeightUpdateFailed(
            f"{name} did not receive what was sent: missing {missing[:5]}, unexpected {extra[:5]}, "
            f"wrong size {wrong[:5]}, unused {report.unused_names[:5]}."
        )
