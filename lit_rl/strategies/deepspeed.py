"""DeepSpeed ZeRO on Lightning's strategy, on GPUs and CPUs, with the micro-batches of lit_rl.

What Lightning's strategy (2.6) and DeepSpeed (0.19) need on top: micro-batches inside one training step must add up,
the engine clips and steps by itself, a network's head is read outside its own forward pass, and the CPU is a device.
DeepSpeed is imported when the strategy is made, not before.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy as LightningDeepSpeedStrategy
from torch import Tensor, nn

from lit_rl.models import Actor

log = logging.getLogger(__name__)


class DeepSpeedStrategy(LightningDeepSpeedStrategy):
    """ZeRO: optimizer state (stage 1), gradients (2) and weights (3) in shards; set by its class path.

    All networks are clipped together by their joint gradient norm, since the engine knows no groups. Checkpoints are
    folders that resume on the same number of ranks only.

    Args:
        stage: What is sharded, see above.
        offload_optimizer: Keep the optimizer's state and its step on the CPU.
        offload_parameters: Keep weights on the CPU between uses (stage 3).
        config: DeepSpeed's configuration, a dictionary or a JSON file, instead of the options above.
        process_group_backend: ``nccl`` on GPUs and ``gloo`` on CPUs where left out.
        timeout: Of collectives; rollouts do not count.

    Raises:
        ModuleNotFoundError: If DeepSpeed is not installed.
    """

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: dict[str, Any] | str | Path | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when DeepSpeed is imported
        try:
            import deepspeed  # noqa: F401
        except ImportError as error:
            raise ModuleNotFoundError(
                "trainer.strategy=DeepSpeedStrategy needs DeepSpeed: DS_BUILD_OPS=0 pip install 'lit_rl[deepspeed]'."
            ) from error
        super().__init__(
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
            config=config,
            # Lightning would ask the loader, which has none.
            logging_batch_size_per_gpu=1,
            process_group_backend=process_group_backend,
            timeout=timeout,
            exclude_frozen_parameters=True,
        )

    @property
    def parallel_devices(self) -> Any:
        """Devices of this machine's ranks; CPUs get a number each, since DeepSpeed counts devices."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices and [
            torch.device("cpu", number) if device.type == "cpu" else device for number, device in enumerate(devices)
        ]

    def set_clipping(self, limits: Mapping[str, float]) -> None:
        """Take the actor's limit for the joint norm, and say so where there are further networks.

        Args:
            limits: Largest gradient norm by parameter group.
        """
        assert isinstance(self.config, dict)
        self.config.setdefault("gradient_clipping", limits["actor"])
        if len(limits) > 1 and self.is_global_zero:
            log.warning(
                "DeepSpeed clips the joint gradient norm of %s at model.max_grad_norm=%s; the limits of the others are "
                "not used. FSDP2Strategy clips each by itself.",
                " and ".join(limits),
                limits["actor"],
            )

    def setup_environment(self) -> None:
        """Accept the CPU, which Lightning refuses (2.6)."""
        if isinstance(self.accelerator, CPUAccelerator):
            import deepspeed

            # Otherwise it compiles a kernel for gloo when it starts: pure gloo needs no compiler.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            super(LightningDeepSpeedStrategy, self).setup_environment()
        else:
            super().setup_environment()

    @contextmanager
    def model_sharded_context(self) -> Generator[None]:
        """Build networks whole: inside DeepSpeed's own context transformers would initialise empty shards (5.19)."""
        self._init_config_if_needed()
        yield

    def setup(self, trainer: L.Trainer) -> None:
        """Start the engine, and tell ZeRO-3 of the weights that are read outside their module's forward pass."""
        super().setup(trainer)
        if self.zero_stage_3 and self.lightning_module is not None:
            for network in self.lightning_module.modules():
                if isinstance(network, Actor):
                    self._register_head(network)

    @staticmethod
    def _register_head(actor: Actor) -> None:
        """Have the head's weight gathered for the whole forward and backward pass of the actor."""
        import deepspeed

        head: nn.Module = actor.network.get_output_embeddings()
        deepspeed.zero.register_external_parameter(actor, head.weight)

    def begin_micro_batch(self, is_last: bool) -> None:
        """Say before a micro-batch's forward pass whether ranks exchange gradients after its backward pass.

        Args:
            is_last: Of the optimizer step.
        """
        engine: Any = self.deepspeed_engine
        # The engine does it once per training step; the gradients of all micro-batches but the last would be lost.
        engine.optimizer.clear_backward_seen_flag()
        engine.set_gradient_accumulation_boundary(is_last)

    def step_and_norm(self, optimizer: Any, frozen: Collection[int] = ()) -> Tensor:
        """Clip and step, or do nothing where a gradient is not finite.

        Args:
            optimizer: Lightning's.
            frozen: Numbers of parameter groups that stay as they are; their gradients must be zero so far.

        Returns:
            Joint gradient norm before clipping; infinite where the step was refused.
        """
        for number in frozen:
            optimizer.param_groups[number]["lr"] = 0.0  # or the weight decay would act
        optimizer.step()
        engine: Any = self.deepspeed_engine
        self._forget_steps(engine.optimizer, frozen)
        if engine.optimizer.overflow:
            return torch.tensor(float("inf"))
        return torch.as_tensor(engine.get_global_grad_norm()).float().cpu()

    def _forget_steps(self, zero: Any, frozen: Collection[int]) -> None:
        """Set the step counts of groups back to 0: AdamW's first real step must be its first one there too."""
        if self.zero_stage_3:
            parts = zip(zero.fp32_partitioned_groups_flat, zero.sub_group_to_group_id.values(), strict=True)
        else:
            parts = zip(zero.single_partition_of_fp32_groups, range(len(zero.param_groups)), strict=True)
        for part, group in parts:
            if group in frozen and "step" in zero.state.get(part, {}):
                zero.state[part]["step"].zero_()
