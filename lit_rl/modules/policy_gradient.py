"""The base of all policy-gradient algorithms: scoring, the update, and the learning-rate schedule, once.

Position in the flow: loader -> on_train_batch_start (scoring) -> **training_step** (one optimizer step) -> weight sync.
Subclasses override `compute_advantages` and `policy_loss` and never see packing, micro-batches or ranks. How weights
reach the replicas is the WeightSync callback's business; how experience is made is the DataModule's.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import aggregate_loss, masked_mean
from lit_rl.algorithms.importance import mismatch_metrics, truncated_importance_weights
from lit_rl.algorithms.kl import kl_penalty
from lit_rl.experience.batch import Experience, MicroBatch, MiniBatch
from lit_rl.experience.evaluation import EvaluationBatch
from lit_rl.metrics.evaluation import evaluation_metrics
from lit_rl.metrics.policy import PolicyMetrics
from lit_rl.models import Actor, Reference, load_causal_lm
from lit_rl.modules.option_ranges import check_update_options
from lit_rl.types import Trajectory

log = logging.getLogger(__name__)


class PolicyGradientModule(L.LightningModule):
    """Owns actor and reference and updates the actor on experience."""

    def __init__(
        self,
        model_name: str,
        actor_lr: float = 1e-6,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        adam_eps: float = 1e-8,
        max_grad_norm: float = 1.0,
        lr_warmup_iterations: int = 0,
        loss_agg_mode: str = "token-mean",
        loss_scale: float | None = None,
        entropy_coef: float = 0.0,
        kl_loss_coef: float = 0.0,
        kl_loss_type: str = "k3",
        importance_cap: float | None = None,
        importance_level: str = "token",
        logprob_gap_warning: float = 0.1,
        max_skipped_steps: int = 10,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Keep the options; the network is loaded in `configure_model`.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            actor_lr: Learning rate of the actor's AdamW, above 0.
            weight_decay: AdamW's decoupled weight decay, at least 0.
            betas: AdamW's averaging coefficients, each in [0, 1).
            adam_eps: Added to the root of AdamW's second moment, above 0.
            max_grad_norm: Largest norm of the actor's gradient; larger ones are scaled down to it.
            lr_warmup_iterations: Iterations over which the learning rate rises linearly to ``actor_lr``; constant
                after.
            loss_agg_mode: How token losses become one number; see `lit_rl.algorithms.aggregate.aggregate_loss`.
            loss_scale: Constant length in tokens that mode ``seq-mean-token-sum-norm`` divides by.
            entropy_coef: Weight of the entropy bonus; 0 is off.
            kl_loss_coef: Weight of the KL term against the reference; 0 is off and loads no reference.
            kl_loss_type: Estimator of that term: ``k1``, ``k2``, ``k3``, ``abs``, or one with ``+`` (gradient of k2).
            importance_cap: Truncate the ratio of the trainer's to the engine's probability at this value and weigh the
                loss with it (truncated importance sampling); ``null`` is off.
            importance_level: ``token`` or ``sequence`` ratios.
            logprob_gap_warning: Warn when trainer and engine differ by more than this on average, in nats per token.
            max_skipped_steps: Stop the run after this many optimizer steps in a row with a loss or gradient that is not
                finite.
            gradient_checkpointing: Recompute activations in the backward pass instead of keeping them.
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
        self.max_grad_norm = max_grad_norm
        self.lr_warmup_iterations = lr_warmup_iterations
        self.loss_agg_mode = loss_agg_mode
        self.loss_scale = loss_scale
        self.entropy_coef = entropy_coef
        self.kl_loss_coef = kl_loss_coef
        self.kl_loss_type = kl_loss_type
        self.importance_cap = importance_cap
        self.importance_level = importance_level
        self.logprob_gap_warning = logprob_gap_warning
        self.max_skipped_steps = max_skipped_steps
        self.gradient_checkpointing = gradient_checkpointing
        check_update_options(self)

        self.actor: Actor | None = None
        self.metrics = PolicyMetrics()
        self.policy_version = 0
        self.steps_since_sync = 0
        self._skipped_in_a_row = 0
        self.reference: Reference | None = None

    # What an algorithm is made of.

    @abstractmethod
    def compute_advantages(self, experience: Experience) -> Tensor:
        """Return ``[N]`` advantages of all ranks' trajectories, or ``[B, T]`` of this rank's tokens, float32."""

    @abstractmethod
    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        """Return the loss per token, ``[B, T]``; the base class aggregates it over the tokens of ``batch.loss_mask``.

        Args:
            logprobs: ``[B, T]`` float32, nats, of the current policy, with gradient.
            batch: Masks, advantages, and the old, engine's and reference's log-probs.
        """

    # Lightning's hooks.

    def setup(self, stage: str) -> None:
        """Count versions from the trainer's iteration: a second fit starts anew. A checkpoint is loaded after this."""
        if stage == "fit":
            self.policy_version = self.trainer.current_epoch
            # What a fit that ended in the middle of an iteration has left.
            self.metrics = PolicyMetrics()
            self._skipped_in_a_row = 0

    def configure_model(self) -> None:
        """Load the networks; called again on later fits, when there is nothing to do."""
        if self.actor is not None:
            return
        self.actor = Actor(load_causal_lm(self.model_name), gradient_checkpointing=self.gradient_checkpointing)
        computes_in_bf16 = self._uses_bf16_working_copy()
        if computes_in_bf16:
            self.actor.enable_bf16_working_copy()
        if self.kl_loss_coef != 0:
            reference = Reference(load_causal_lm(self.model_name), dtype=torch.bfloat16 if computes_in_bf16 else None)
            # A plain holder: absent from checkpoints, from the optimizer and from the strategy's wrapping.
            self.reference = reference

    def configure_optimizers(self) -> Any:
        """One AdamW with the parameter group ``actor``; the schedule is a function of the iteration, without state."""
        assert self.actor is not None
        parameters = [parameter for parameter in self.actor.parameters() if parameter.requires_grad]
        group = {"params": parameters, "lr": self.actor_lr, "weight_decay": self.weight_decay, "name": "actor"}
        group["base_lr"] = self.actor_lr
        return torch.optim.AdamW([group], lr=self.actor_lr, betas=self.betas, eps=self.adam_eps, fused=True)

    def learning_rate_factor(self, iteration: int) -> float:
        """Share of the learning rate in an iteration (from 0): linear warm-up, then 1."""
        return min(1.0, (iteration + 1) / (self.lr_warmup_iterations + 1))

    def on_train_batch_start(self, batch: MiniBatch, batch_idx: int) -> None:
        """Score the experience before the first update that uses it."""
        if not batch.experience.is_scored:
            self.score(batch.experience)

    def training_step(self, batch: MiniBatch, batch_idx: int) -> None:
        """Learn from one mini-batch: one optimizer step, or none where nothing has weight."""
        phase = batch.experience.phase
        if batch.is_first:
            phase.start(
                "update", total=len(batch.experience.plan.mini_batches) * len(batch.experience.plan.mini_batches[0])
            )
            self._update_started = time.perf_counter()
        has_weight = self._has_weight(batch)
        self.metrics.count("actor/skipped_weightless_steps", 0.0 if has_weight else 1.0)
        if has_weight:
            self._step(batch)
        phase.advance(1)
        if batch.is_last:
            self._finish_iteration(batch.experience)

    def validation_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Measure one data source."""
        self._log_evaluation(batch)

    def test_step(self, batch: EvaluationBatch, batch_idx: int) -> None:
        """Measure one data source."""
        self._log_evaluation(batch)

    def predict_step(self, batch: EvaluationBatch, batch_idx: int) -> list[Trajectory]:
        """Return the trajectories as they are."""
        return batch.trajectories

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the policy version beside the weights."""
        checkpoint["lit_rl_policy_version"] = self.policy_version

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
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            restored, wanted = (group["base_lr"], group["weight_decay"]), (self.actor_lr, self.weight_decay)
            if restored != wanted:
                log.warning(
                    "The checkpoint's learning rate and weight decay %s differ from the configuration's %s, "
                    "which are used.",
                    restored,
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

    # The steps of an iteration.

    def score(self, experience: Experience) -> None:
        """Compute what the updates need of the policy as it is now: old and reference log-probs, then advantages.

        With one update per iteration the old log-probs are the current ones, so no pass is run for them.
        """
        experience.phase.start("scoring")
        passes = experience.plan.mini_batches
        if sum(len(one_pass) for one_pass in passes) > 1:
            started = time.perf_counter()
            self._score_with("old_logprobs", experience, self._current_logprobs)
            self.metrics.mean("timing_s/old_log_prob", time.perf_counter() - started)
        if self.reference is not None:
            started = time.perf_counter()
            self._score_with("ref_logprobs", experience, self._reference_logprobs)
            self.metrics.mean("timing_s/ref", time.perf_counter() - started)
        started = time.perf_counter()
        advantages = self.compute_advantages(experience)
        experience.advantages = advantages.detach().float()
        experience.is_scored = True
        self.metrics.mean("timing_s/adv", time.perf_counter() - started)
        if len(experience.advantages):
            self.metrics.mean("critic/advantages/mean", experience.advantages.mean())
            self.metrics.maximum("critic/advantages/max", experience.advantages.max())

    @torch.no_grad()
    def _score_with(self, name: str, experience: Experience, logprobs: Callable[[MicroBatch], Tensor]) -> None:
        """Fill a column with the first pass's micro-batches: equal rows give equal numbers, and a first ratio of 1."""
        # Hooks outside training_step have no precision context of their own (Lightning 2.6).
        with self.trainer.precision_plugin.train_step_context():
            for index in range(len(experience.plan.mini_batches[0])):
                mini_batch = MiniBatch(experience, 0, index, self.global_rank).to(self.device)
                for micro_batch, _ in mini_batch.micro_batches():
                    experience.store(name, micro_batch.positions, logprobs(micro_batch))

    def _current_logprobs(self, batch: MicroBatch) -> Tensor:
        return self._forward(batch, with_entropy=False).logprobs

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        assert self.reference is not None
        return self.reference.to(self.device).score(batch.packed, batch.temperature)

    def _forward(self, batch: MicroBatch, *, with_entropy: bool) -> Any:
        assert self.actor is not None
        if self.actor.working_copy is not None:
            # The copy is bfloat16 already: autocast would only look for casts to make.
            with torch.autocast(self.device.type, enabled=False):
                return self.actor(batch.packed, batch.temperature, with_entropy)
        return self.actor(batch.packed, batch.temperature, with_entropy)

    def _has_weight(self, batch: MiniBatch) -> bool:
        """Whether the loss can move the weights: AdamW's momentum would move them on a zero gradient too."""
        if batch.plan.num_loss_tokens == 0:
            return False
        if self.kl_loss_coef != 0 or self.entropy_coef != 0:
            return True
        return any(batch.experience.has_weight(index) for indices in batch.indices for index in indices)

    def _step(self, batch: MiniBatch) -> None:
        """Forward, backward, clip and step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        only_weighted = self.kl_loss_coef == 0 and self.entropy_coef == 0
        loss = torch.zeros((), device=self.device)
        for micro_batch, _ in batch.micro_batches(only_weighted=only_weighted):
            micro_loss = self.micro_batch_loss(micro_batch, batch)
            self.manual_backward(micro_loss)
            loss += micro_loss.detach()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(grad_norm)):
            self._skip_not_finite(loss, grad_norm)
            return
        self._skipped_in_a_row = 0
        optimizer.step()
        self.steps_since_sync += 1
        self.metrics.mean("actor/pg_loss", loss)
        self.metrics.mean("actor/grad_norm", grad_norm)
        self.metrics.maximum("actor/grad_norm_max", grad_norm)

    def micro_batch_loss(self, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        """Loss summand of a micro-batch: summed over the mini-batch's micro-batches it is the mini-batch's loss."""
        scores = self._forward(batch, with_entropy=self.entropy_coef != 0)
        logprobs, mask = scores.logprobs, batch.loss_mask
        if batch.old_logprobs is None:
            batch.old_logprobs = logprobs.detach()
        token_loss = self.policy_loss(logprobs, batch)
        if self.importance_cap is not None:
            token_loss = token_loss * truncated_importance_weights(
                batch.old_logprobs, batch.rollout_logprobs, mask, level=self.importance_level, cap=self.importance_cap
            )
        loss = self._aggregate(token_loss, batch, mini_batch)
        if self.entropy_coef != 0:
            loss = loss - self.entropy_coef * self._aggregate(scores.entropies, batch, mini_batch)
        if self.kl_loss_coef != 0:
            assert batch.ref_logprobs is not None
            kl = kl_penalty(logprobs, batch.ref_logprobs, self.kl_loss_type)
            loss = loss + self.kl_loss_coef * self._aggregate(kl, batch, mini_batch)
            self.metrics.mean("actor/kl_loss", masked_mean(kl.detach(), mask), mask.sum())
        self._record(logprobs.detach(), scores.entropies, batch, mini_batch)
        return loss

    def _aggregate(self, token_values: Tensor, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        return aggregate_loss(
            token_values,
            batch.loss_mask,
            mode=self.loss_agg_mode,
            num_tokens=mini_batch.plan.num_loss_tokens,
            num_sequences=mini_batch.plan.num_sequences,
            loss_scale=self.loss_scale,
            prompt_weights=mini_batch.prompt_weights(batch) if self.loss_agg_mode == "prompt-mean" else None,
        )

    def _record(self, logprobs: Tensor, entropies: Tensor | None, batch: MicroBatch, mini_batch: MiniBatch) -> None:
        """Collect what is always watched: entropy, distance from the old policy, and from the engine."""
        mask, num_tokens = batch.loss_mask, batch.loss_mask.sum()
        assert batch.old_logprobs is not None
        # On-policy, -log p of the sampled tokens estimates the entropy without bias; the exact one costs a pass over
        # logits.
        entropy = -logprobs if entropies is None else entropies.detach()
        self.metrics.mean("actor/entropy", masked_mean(entropy, mask), num_tokens)
        self.metrics.mean("actor/ppo_kl", masked_mean(batch.old_logprobs - logprobs, mask), num_tokens)
        if mini_batch.is_first:
            deviation = masked_mean(((logprobs - batch.old_logprobs).exp() - 1).abs(), mask)
            self.metrics.mean("actor/first_ratio_deviation", deviation, num_tokens)
        if mini_batch.epoch == 0:
            gaps = mismatch_metrics(batch.old_logprobs, batch.rollout_logprobs, mask)
            self.metrics.maximum("rollout_corr/logprob_gap_max", gaps.pop("rollout_corr/logprob_gap_max"))
            for name, value in gaps.items():
                self.metrics.mean(name, value, num_tokens)

    def _skip_not_finite(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Count a step that would have destroyed the weights, and stop after too many in a row."""
        self._skipped_in_a_row += 1
        self.metrics.count("actor/skipped_not_finite_steps")
        log.warning("Optimizer step skipped: loss %s, gradient norm %s.", float(loss), float(grad_norm))
        if self._skipped_in_a_row >= self.max_skipped_steps:
            raise RuntimeError(
                f"{self._skipped_in_a_row} optimizer steps in a row had a loss or gradient that is not finite "
                f"(model.max_skipped_steps={self.max_skipped_steps}). Lower model.actor_lr, or look at the rewards and "
                "log-probs."
            )

    def _finish_iteration(self, experience: Experience) -> None:
        """Advance the version and log the iteration."""
        learning_rate = float(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        self.policy_version += 1
        update_s = time.perf_counter() - self._update_started
        metrics = experience.metrics | self.metrics.compute()
        metrics |= {"actor/lr": learning_rate, "timing_s/update_actor": update_s}
        self._warn(metrics)
        self.log_iteration(metrics)

    def log_iteration(self, metrics: dict[str, float]) -> None:
        """Log numbers of this iteration; loggers get the iteration as their step."""
        iteration = float(self.current_epoch)
        values = {"iteration": iteration, "step": iteration, **metrics}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def _log_evaluation(self, batch: EvaluationBatch) -> None:
        values = evaluation_metrics(batch.data_source, batch.trajectories) | {"step": float(self.policy_version)}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1, add_dataloader_idx=False)

    def _warn(self, metrics: dict[str, float]) -> None:
        """Say what a person should look at."""
        gap = metrics.get("rollout_corr/logprob_gap_mean", 0.0)
        if gap > self.logprob_gap_warning:
            log.warning(
                "Iteration %d: the engine's log-probs differ from the trainer's by %.3f nats per token on average "
                "(warning above "
                "model.logprob_gap_warning=%s). Sampling and training see different policies; model.importance_cap=2.0 "
                "corrects it.",
                self.current_epoch,
                gap,
                self.logprob_gap_warning,
            )
        if metrics.get("actor/first_ratio_deviation", 0.0) > 1e-3:
            log.warning(
                "Iteration %d: the first ratio differs from 1 by %.4f on average: scoring and training disagree.",
                self.current_epoch,
                metrics["actor/first_ratio_deviation"],
            )

    def _uses_bf16_working_copy(self) -> bool:
        """On one CPU in mixed precision a bfloat16 copy is faster than autocast, which casts weights on every call."""
        from lightning.pytorch.strategies import SingleDeviceStrategy

        trainer = self._trainer
        return (
            trainer is not None
            and trainer.precision == "bf16-mixed"
            and isinstance(trainer.strategy, SingleDeviceStrategy)
            and trainer.strategy.root_device.type == "cpu"
        )
