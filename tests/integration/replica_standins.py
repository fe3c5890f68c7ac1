"""Replicas that a configuration names by path: real ones that answer or fail in a way a test needs."""

from __future__ import annotations

from typing import Any, ClassVar

from lit_rl.serving.replica import WeightReport
from lit_rl.serving.transformers_replica import TransformersReplica
from lit_rl.serving.vllm_replica import VLLMReplica
from lit_rl.types import SamplingParams, TokenOutput


class OftenSilentReplica(TransformersReplica):
    """Answers every second request with no token at all."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_requests = 0

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        self.num_requests += 1
        if self.num_requests % 2:
            return TokenOutput(token_ids=[], logprobs=[], stop_reason="stop", policy_versions=[])
        return await super().generate(prompt_ids, sampling, request_id)


class SilentReplica(TransformersReplica):
    """Never says anything."""

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        return TokenOutput(token_ids=[], logprobs=[], stop_reason="stop", policy_versions=[])


class RecordingReplica(TransformersReplica):
    """Notes the calls of a weight update, of all replicas together."""

    calls: ClassVar[list[tuple[int, str]]] = []

    async def pause(self) -> None:
        self.calls.append((self.rank, "pause"))
        await super().pause()

    async def wake(self) -> None:
        self.calls.append((self.rank, "wake"))

    async def start_weight_update(self) -> None:
        self.calls.append((self.rank, "start"))
        await super().start_weight_update()

    async def update_weights(self, bucket: dict[str, Any]) -> None:
        self.calls.append((self.rank, "bucket"))
        await super().update_weights(bucket)

    async def finish_weight_update(self, version: int) -> WeightReport:
        self.calls.append((self.rank, f"finish {version}"))
        return await super().finish_weight_update(version)

    async def resume(self) -> None:
        self.calls.append((self.rank, "resume"))
        await super().resume()


class SecondRefusesWeightsReplica(TransformersReplica):
    """The replica of rank 1 cannot load what is sent after the first update."""

    async def update_weights(self, bucket: dict[str, Any]) -> None:
        if self.rank == 1 and self.version >= 0:
            raise OSError("the bucket cannot be read")
        await super().update_weights(bucket)


class CountingVLLMReplica(VLLMReplica):
    """Says in ``health`` how many requests it has had."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_requests = 0

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        self.num_requests += 1
        return await super().generate(prompt_ids, sampling, request_id)

    async def health(self) -> dict[str, Any]:
        return {**await super().health(), "num_requests": self.num_requests}
