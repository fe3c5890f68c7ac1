"""FSDP2 on Lightning's ModelParallelStrategy: weights, gradients and optimizer state in shards over all ranks.

Modules need to know nothing of it. What is sharded: every decoder layer by itself, and what is left (embeddings, final
norm, head) as one more unit per network; the same for critics, references and teachers. Source: Lightning's
ModelParallelStrategy (2.6), torch's ``fully_shard`` (2.13).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from lit_rl.models import Reference


class FSDP2Strategy(ModelParallelStrategy):
    """Shard everything over all ranks; set as ``trainer.strategy`` by its class path.

    Args:
        cpu_offload: Keep shards, gradients and optimizer state in the machine's memory, and bring a unit's weights onto
            the device when it computes. For models that do not fit otherwise; slow.
        reshard_after_forward: Give a layer's weights back after its forward pass and gather them again for the
            backward pass. ``false`` keeps them: faster, and memory for a whole copy in the computing dtype.
        sync_every_micro_batch: Reduce gradients after every micro-batch instead of after the last one of a step. Saves
            a whole float32 gradient per rank, for one exchange per micro-batch.
        save_full_checkpoint: Gather each checkpoint into one file on rank 0 instead of a folder with a file per rank.
        process_group_backend: ``nccl`` on GPUs and ``gloo`` on CPUs where left out.
        timeout: Of collectives; rollouts do not count.
    """

    def __init__(
        self,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
        sync_every_micro_batch: bool = False,
        save_full_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(
            data_parallel_size=1,  # set to the number of ranks once that is known
            tensor_parallel_size=1,
            save_distributed_checkpoint=not save_full_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.cpu_offload = cpu_offload
        self.reshard_after_forward = reshard_after_forward
        self.sync_every_micro_batch = sync_every_micro_batch

    def setup_environment(self) -> None:
        """Make one data-parallel group of all ranks."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: L.Trainer) -> None:
        """Shard the networks of the module, then do what Lightning does."""
        assert self.lightning_module is not None
        for network in networks_of(self.lightning_module):
            self.shard(network)
        super().setup(trainer)

    def shard(self, network: nn.Module) -> None:
        """Shard a network in place; nothing where it is already.

        Args:
            network: Contains a transformers model.
        """
        if isinstance(network, FSDPModule):
            return
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": self._mixed_precision(),
            "reshard_after_forward": self.reshard_after_forward,
        }
        if self.cpu_offload and any(parameter.requires_grad for parameter in network.parameters()):
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        for layer in decoder_layers(network):
            fully_shard(layer, **options)
        for child in network.children():
            if not any(isinstance(part, PreTrainedModel) for part in child.modules()):
                # A value head: one number per token, which bfloat16 would round to three digits.
                fully_shard(child, **options | {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)})
        # Its weights are the last that the forward pass reads and the first of the backward pass.
        fully_shard(network, **options | {"reshard_after_forward": False})

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Keep gradients to this rank inside the context; Lightning's does nothing here (2.6)."""
        assert self.lightning_module is not None
        sharded = [child for child in self.lightning_module.children() if isinstance(child, FSDPModule)]
        if self.sync_every_micro_batch:
            sharded = []
        for network in sharded:
            network.set_requires_gradient_sync(False)
            network.set_is_last_backward(False)
        try:
            yield
        finally:
            for network in sharded:
                network.set_requires_gradient_sync(True)
                network.set_is_last_backward(True)

    def model_to_device(self) -> None:
        """Move the module; with ``cpu_offload`` only its buffers."""
        assert self.model is not None
        if not self.cpu_offload:
            super().model_to_device()
            return
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name, buffer.to(self.root_device), persistent=name not in module._non_persistent_buffers_set
                )

    def _mixed_precision(self) -> MixedPrecisionPolicy:
        """Compute in bfloat16 and reduce in float32, where the Trainer's precision is mixed; masters are float32."""
        if self.precision_plugin.precision != "bf16-mixed":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def networks_of(module: L.LightningModule) -> list[nn.Module]:
    """Return the networks of a module: its children with parameters, and frozen ones it holds unregistered.

    Args:
        module: A PolicyModule after `configure_model`.
    """
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    held = [value.scorer for value in vars(module).values() if isinstance(value, Reference)]
    return [*children, *held]


def decoder_layers(network: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers says must not be split, outermost ones only.

    Args:
        network: Contains a transformers model.

    Raises:
        ValueError: If there is none: the whole network would be gathered at once.
    """
    names: set[str] = set()
    for module in network.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    inside: set[int] = set()
    for module in network.modules():
        if type(module).__name__ in names and id(module) not in inside:
            layers.append(module)
            inside |= {id(part) for part in module.modules()}
    if not layers:
        raise ValueError(
            f"{type(network).__name__} names no layers that belong together (transformers' _no_split_modules), so "
            "FSDP2Strategy cannot shard it layer by layer. Use trainer.strategy=ddp for this model."
        )
    return layers
