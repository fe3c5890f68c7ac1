"""A weight-transfer engine for vLLM that reads buckets from shared memory, and the report on what it loaded.

vLLM's own processes load this module (entry point ``vllm.general_plugins``), so it is the one place that imports vllm
at the top of functions called there. The trainer writes each bucket as a safetensors file
(`lit_rl.weight_sync.shared_memory`), this engine maps it and feeds it to vLLM's layer-wise reload. Nothing here knows
about Ray or Lightning.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on before the first bucket."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket.

    Attributes:
        path: A safetensors file of full tensors under their Hugging Face names.
    """

    path: str


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads full tensors from files on the same host."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect to."""
        self.bytes_received: dict[str, int] = {}

    def start_weight_update(self) -> None:
        """Set vLLM's layer-wise reload up; it repacks each layer once all of its tensors have come."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.bytes_received = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket (the base class would synchronize an accelerator first, which a CPU lacks)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Feed the bucket's tensors to the model's own loader."""
        with safe_open(update_info.path, "pt") as bucket:

            def tensors() -> Any:
                for name in bucket.keys():  # noqa: SIM118 - safe_open is not a mapping
                    tensor = bucket.get_tensor(name)
                    self.bytes_received[name] = tensor.numel() * tensor.element_size()
                    yield name, tensor

            self.model.load_weights(tensors())  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        """Finish the reload."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        _process_tied_heads(self.model)

    def shutdown(self) -> None:
        """Nothing to close."""


def _process_tied_heads(model: torch.nn.Module) -> None:
    """Repack output heads that are tied to the embedding.

    vLLM's CPU build multiplies with a packed copy of the head. The reload repacks only layers that tensors were sent
    for, and none is sent for a tied head: its weight changes with the embedding's, but the copy would stay the first
    policy's (0.32).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
            layer.quant_method.process_weights_after_loading(layer)


class WeightReportExtension:
    """Mixed into vLLM's worker (``worker_extension_cls``): answers what the last update brought."""

    def lit_rl_weight_report(self) -> dict[str, Any]:
        """Bytes received under each name in the last update, and a digest over all loaded parameters."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        checksums = self.compute_weight_checksums()  # type: ignore[attr-defined, operator]
        digest = hashlib.sha256(repr(sorted(checksums.items())).encode()).hexdigest()
        return {"bytes_received": dict(engine.bytes_received), "checksum": digest, "num_tensors": len(checksums)}


def register() -> None:
    """Register the engine under ``shared_memory``; safe to call twice (vLLM loads plugins in each of its processes)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "shared_memory" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("shared_memory", __name__, "SharedMemoryEngine")
