"""What Lightning asks of a module that trains a policy: networks, optimizer, schedule, checkpoints, evaluation.

Position in the flow: base of `PolicyGradientModule`, which does the steps of an iteration. Nothing here knows a loss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_rl.experience.batch import MiniBatch
from lit_rl.experience.data_module import RunDataModule
from lit_rl.experience.evaluation import EvaluationBatch
from lit_rl.models import Actor, Reference, load_causal_lm
from lit_rl.models.actor import TokenScores
from lit_rl.models.lora import LoraSettings, add_lora
from lit_rl.models.packing import PackedSequences, pack
from lit_rl.models.reference import AdapterFreeActor, FrozenPolicy
from lit_rl.modules.option_ranges import check_optimizer_options
from lit_rl.strategies import DeepSpeedStrategy
from lit_rl.types import Trajectory

log = logging.getLogger(__name__)


class PolicyModule(L.LightningModule):
    """Owns actor and reference, and the optimizer.

    Attributes:
        batch_class: What it learns from; a DataModule that serves others is refused.
        min_group_size: Trajectories of a prompt that the algorithm compares with each other, at least.
        policy_version: Iterations that the actor's weights have been trained for.
        steps_since_sync: Optimizer steps that the replicas have not seen.
    """

    batch_class: type = MiniBatch
    min_group_size = 1

    def __init__(
        self,
        model_name: str,
        actor_lr: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        lr_warmup_iterations: int = 0,
        gradient_checkpointing: bool = False,
        lora: LoraSettings | None = None,
        attn_implementation: str = "sdpa",
    ) -> None:
        """Keep the options; the networks are loaded in `configure_model`.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            actor_lr: Learning rate of the actor's AdamW, above 0.
            weight_decay: AdamW's decoupled weight decay, at least 0.
            betas: AdamW's averaging coefficients, each in [0, 1).
            adam_eps: Added to the root of AdamW's second moment, above 0.
            lr_warmup_iterations: Iterations over which the learning rate rises linearly to ``actor_lr``; constant
                after.
            gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
            lora: Train low-rank adapters instead of all weights (needs peft); the reference is the policy without them.
            attn_implementation: Attention of transformers: ``sdpa``, ``eager``, or on a GPU ``flash_attention_2``,
                which does not go with ``data.share_prompts``.
        """
        super().__init__()
        self.automatic_optimization = False
        # Frozen and auxiliary state is not in checkpoints.
        self.strict_loading = False
        self.model_name = model_name
        self.actor_lr = actor_lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.adam_eps = adam_eps
        self.lr_warmup_iterations = lr_warmup_iterations
        self.gradient_checkpointing = gradient_checkpointing
        self.lora = lora
        self.attn_implementation = attn_implementation
        check_optimizer_options(self)
        self.actor: Actor | None = None
        self.reference: FrozenPolicy | None = None
        self.policy_version = 0
        self.steps_since_sync = 0

    # What an algorithm may change.

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy is loaded and scores the experience."""
        return False

    def parameter_groups(self) -> list[dict[str, Any]]:
        """AdamW's parameter groups, each with ``name``, ``params``, ``lr`` and ``weight_decay``."""
        assert self.actor is not None
        parameters = [parameter for parameter in self.actor.parameters() if parameter.requires_grad]
        return [{"name": "actor", "params": parameters, "lr": self.actor_lr, "weight_decay": self.weight_decay}]

    def check_data(self, data: Any) -> None:
        """Raise ``ValueError`` where an option of the DataModule ``data`` does not go with the algorithm."""

    # Lightning's hooks.

    def prepare_data(self) -> None:
        """Check what the algorithm asks of the data; Lightning calls it before any engine starts."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.trainer.state.fn != TrainerFn.FITTING or data is None:
            return
        if isinstance(data, RunDataModule) and not issubclass(data.batch_class, self.batch_class):
            raise ValueError(
                f"{type(self).__name__} learns from a {self.batch_class.__name__}, {type(data).__name__} serves a "
                f"{data.batch_class.__name__}. SFT goes with lit_rl.SFTDataModule or lit_rl.WarmupDataModule, the "
                "other modules with lit_rl.RolloutDataModule."
            )
        if getattr(data, "share_prompts", False) and self.attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"model.attn_implementation={self.attn_implementation!r} takes no mask, which data.share_prompts=true "
                "needs. Set data.share_prompts to false, or use sdpa."
            )
        self.check_data(data)

    def setup(self, stage: str) -> None:
        """Count versions from the trainer's iteration: a second fit starts anew. A checkpoint is loaded after this."""
        if stage != "fit":
            return
        self.policy_version = self.trainer.current_epoch
        group_size = getattr(self.trainer.datamodule, "group_size", self.min_group_size)  # type: ignore[attr-defined]
        if group_size < self.min_group_size:
            log.warning(
                "data.group_size=%d: every advantage is 0 and the policy learns nothing from its rewards, since %s "
                "compares the trajectories of one prompt with each other. Set data.group_size to at least %d.",
                group_size,
                type(self).__name__,
                self.min_group_size,
            )

    def configure_model(self) -> None:
        """Load the networks; called again on later fits, when there is nothing to do."""
        if self.actor is not None:
            return
        network = load_causal_lm(self.model_name, attn_implementation=self.attn_implementation)
        if self.lora is not None:
            add_lora(network, self.lora)
        self.actor = Actor(network, gradient_checkpointing=self.gradient_checkpointing)
        computes_in_bf16 = self.uses_bf16_working_copy()
        if computes_in_bf16:
            self.actor.enable_bf16_working_copy()
        if not self.needs_reference:
            return
        # A plain holder: absent from checkpoints, from the optimizer and from the strategy's wrapping.
        if self.lora is not None:
            self.reference = AdapterFreeActor(self.actor)
        else:
            frozen = load_causal_lm(self.model_name, attn_implementation=self.attn_implementation)
            self.reference = Reference(frozen, dtype=torch.bfloat16 if computes_in_bf16 else None)

    def configure_optimizers(self) -> Any:
        """One AdamW over all groups; the schedule is a function of the iteration, without state."""
        groups = [{**group, "base_lr": group["lr"]} for group in self.parameter_groups()]
        return torch.optim.AdamW(groups, lr=self.actor_lr, betas=self.betas, eps=self.adam_eps, fused=True)

    def learning_rate_factor(self, iteration: int) -> float:
        """Share of the learning rate in an iteration (from 0): linear warm-up, then 1."""
        return min(1.0, (iteration + 1) / (self.lr_warmup_iterations + 1))

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Measure one data source."""
        self._log_evaluation(batch)

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Measure one data source."""
        self._log_evaluation(batch)

    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> list[Trajectory]:
        """Return this rank's trajectories as they are."""
        return list(batch.trajectories)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the policy version beside the weights, and what they started from, for ``lit-rl export``."""
        checkpoint["lit_rl_policy_version"] = self.policy_version
        lora = None if self.lora is None else self.lora.as_dict()
        checkpoint["lit_rl_model"] = {"model_name": self.model_name, "lora": lora}
        if lora is not None and "state_dict" in checkpoint:
            # What is frozen is in model_name.
            trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
            weights = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: weights[name] for name in weights if name in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the policy version of the weights that are loaded."""
        if "state_dict" in checkpoint:  # sharded strategies read the weights on their own
            # Lightning would leave out silently what is missing: loading is not strict.
            trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
            missing = [name for name in trained if name not in checkpoint["state_dict"]]
            if missing or "lit_rl_policy_version" not in checkpoint:
                raise ValueError(
                    f"The checkpoint lacks {len(missing)} of the {len(trained)} weights of model_name="
                    f"{self.model_name} {missing[:3]}: it is of another model or of another program. Give ckpt_path a "
                    "checkpoint of this model."
                )
        self.policy_version = int(checkpoint["lit_rl_policy_version"])

    def on_train_start(self) -> None:
        """The configuration wins over what a checkpoint brought."""
        configured = {group["name"]: (group["lr"], group["weight_decay"]) for group in self.parameter_groups()}
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            restored, wanted = (group["base_lr"], group["weight_decay"]), configured[group["name"]]
            if restored != wanted:
                log.warning(
                    "The checkpoint's learning rate and weight decay %s of the %s differ from the configuration's %s, "
                    "which are used.",
                    restored,
                    group["name"],
                    wanted,
                )
                group["base_lr"], group["weight_decay"] = wanted

    def on_train_epoch_start(self) -> None:
        """Set the iteration's learning rate."""
        self._iteration_started = time.perf_counter()
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = group["base_lr"] * self.learning_rate_factor(self.current_epoch)

    def on_train_batch_end(self, outputs: Any, batch: MiniBatch, batch_idx: int) -> None:
        """Time the iteration; callbacks, the weight sync among them, have had this hook before."""
        if batch.is_last:
            seconds = {"timing_s/step": time.perf_counter() - self._iteration_started}
            self.log_dict(seconds, on_step=False, on_epoch=True, batch_size=1)

    # What the steps of an iteration use.

    def forward_actor(self, batch: Any, *, with_entropy: bool, **wanted: bool) -> TokenScores:
        """Score a micro-batch (its ``packed`` row at its ``temperature``) with the actor, or its bfloat16 copy.

        Args:
            batch: The micro-batch.
            with_entropy: Also return entropies.
            wanted: Further options of `Actor.forward`, such as ``with_most_likely``.
        """
        return self._score_packed(batch.packed, batch.temperature, with_entropy=with_entropy, **wanted)

    @torch.no_grad()
    def sequence_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs, at temperature 1, of every token but the first of each sequence of ids, in nats.

        Computed as training computes, and on every rank alike: where a strategy shards the network, all take part.
        """
        packed = pack(
            [ids[:1] for ids in sequences],
            [ids[1:] for ids in sequences],
            [[1] * (len(ids) - 1) for ids in sequences],
            share_prompts=False,
        ).to(self.device)
        # Hooks outside training_step have no precision context of their own (Lightning 2.6).
        with self.trainer.precision_plugin.train_step_context():
            rows = self._score_packed(packed, 1.0).logprobs.tolist()
        return [row[: len(ids) - 1] for row, ids in zip(rows, sequences, strict=True)]

    def _score_packed(self, packed: PackedSequences, temperature: float, **wanted: bool) -> TokenScores:
        assert self.actor is not None
        # The copy is bfloat16 already: autocast would only look for casts to make.
        has_copy = self.actor.working_copy is not None
        with torch.autocast(self.device.type, enabled=False) if has_copy else nullcontext():
            scores: TokenScores = self.actor(packed, temperature, **wanted)
        return scores

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over all ranks, on the CPU."""
        return self._reduce(values, "sum")

    def max_over_ranks(self, values: Tensor) -> Tensor:
        """Elementwise maximum of a small tensor over all ranks, on the CPU."""
        return self._reduce(values, "max")

    def _reduce(self, values: Tensor, operation: str) -> Tensor:
        if self.trainer.world_size == 1:
            return values.cpu()
        # A copy: strategies reduce in place.
        values = values.detach().to(self.device, copy=True)
        return self.trainer.strategy.reduce(values, reduce_op=operation).cpu()  # type: ignore[union-attr]

    def gather_over_ranks(self, value: Any) -> list[Any]:
        """What every rank has passed in, in the order of ranks; for small picklable values."""
        if self.trainer.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def gradient_sync(self, is_last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch's forward and backward: ranks exchange gradients in the last one only."""
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            strategy.begin_micro_batch(is_last)
            return nullcontext()
        if is_last or not isinstance(strategy, ParallelStrategy):
            return nullcontext()
        return strategy.block_backward_sync()

    def log_iteration(self, metrics: dict[str, float]) -> None:
        """Log numbers of this iteration; loggers get the iteration as their step."""
        iteration = float(self.current_epoch)
        values = {"iteration": iteration, "step": iteration, **metrics}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def _log_evaluation(self, batch: EvaluationBatch) -> None:
        values = batch.metrics | {"step": float(self.policy_version)}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1, add_dataloader_idx=False)

    def uses_bf16_working_copy(self) -> bool:
        """On one CPU in mixed precision a bfloat16 copy is faster than autocast, which casts weights on every call."""
        from lightning.pytorch.strategies import SingleDeviceStrategy

        trainer = self._trainer
        return (
            trainer is not None
            and trainer.precision == "bf16-mixed"
            and isinstance(trainer.strategy, SingleDeviceStrategy)
            and trainer.strategy.root_device.type == "cpu"
        )
