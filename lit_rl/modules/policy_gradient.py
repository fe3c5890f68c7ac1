"""The base of all policy-gradient algorithms: scoring and the update, once.

Position in the flow: loader -> on_train_batch_start (scoring) -> **training_step** (one optimizer step) -> weight sync.
Subclasses override `compute_advantages` and `policy_loss` and never see packing, micro-batches or ranks. How weights
reach the replicas is the WeightSync callback's business; how experience is made is the DataModule's; networks,
optimizer, checkpoints and evaluation are in `PolicyModule`.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.advantages import zero_spread_share
from lit_rl.algorithms.aggregate import aggregate_loss, masked_mean
from lit_rl.algorithms.importance import PRESETS, mismatch_metrics
from lit_rl.algorithms.kl import kl_penalty
from lit_rl.experience.batch import Experience, MicroBatch, MiniBatch
from lit_rl.metrics.policy import PolicyMetrics
from lit_rl.modules.optimizer_step import GuardedStep
from lit_rl.modules.option_ranges import check_choice, check_number, check_update_options
from lit_rl.modules.policy_module import PolicyModule
from lit_rl.modules.rollout_corrector import RolloutCorrector
from lit_rl.strategies import DeepSpeedStrategy

log = logging.getLogger(__name__)


class PolicyGradientModule(PolicyModule):
    """Updates the actor on experience."""

    def __init__(
        self,
        model_name: str,
        max_grad_norm: float = 1.0,
        loss_agg_mode: str = "token-mean",
        loss_scale: float | None = None,
        entropy_coef: float = 0.0,
        kl_loss_coef: float = 0.0,
        kl_loss_type: str = "k3",
        rollout_correction: str = "off",
        rollout_correction_cap: float = 2.0,
        logprob_gap_warning: float = 0.1,
        max_skipped_steps: int = 10,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            max_grad_norm: Largest norm of the actor's gradient; larger ones are scaled down to it.
            loss_agg_mode: How token losses become one number; see `lit_rl.algorithms.aggregate.aggregate_loss`.
            loss_scale: Constant length in tokens that mode ``seq-mean-token-sum-norm`` divides by.
            entropy_coef: Weight of the entropy bonus; 0 is off.
            kl_loss_coef: Weight of the KL term against the reference; 0 is off and loads no reference.
            kl_loss_type: Estimator of that term: ``k1``, ``k2``, ``k3``, ``abs``, or one with ``+`` (gradient of k2).
            rollout_correction: How a gap between the trainer's and the engine's log-probs is corrected: ``off``,
                ``token-tis``, ``seq-tis``, ``icepop``, ``geo-rejection``, ``bypass`` or another key of
                `lit_rl.algorithms.importance.PRESETS`. Rejected tokens still count in the loss's denominator.
            rollout_correction_cap: Largest importance weight of presets that truncate it (``tis``), above 0.
            logprob_gap_warning: Warn when trainer and engine differ by more than this on average, in nats per token.
            max_skipped_steps: Stop the run after this many optimizer steps in a row with a loss or gradient that is not
                finite.
            kwargs: Options of `PolicyModule`.
        """
        super().__init__(model_name, **kwargs)
        self.loss_agg_mode = loss_agg_mode
        self.loss_scale = loss_scale
        self.entropy_coef = entropy_coef
        self.kl_loss_coef = kl_loss_coef
        self.kl_loss_type = kl_loss_type
        self.logprob_gap_warning = logprob_gap_warning
        check_update_options(self, max_grad_norm=max_grad_norm, max_skipped_steps=max_skipped_steps)
        check_choice("rollout_correction", rollout_correction, PRESETS)
        check_number("rollout_correction_cap", rollout_correction_cap, above=0)
        self.metrics = PolicyMetrics()
        self.max_grad_norms = {"actor": max_grad_norm}
        self._guarded_step = GuardedStep(self.max_grad_norms, max_skipped_steps)
        self._corrector = RolloutCorrector(rollout_correction, rollout_correction_cap, self.metrics)
        self._losses: dict[str, Tensor] = {}

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

    # What an algorithm may change.

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen copy of the first policy is loaded and scores the experience."""
        return self.kl_loss_coef != 0

    @property
    def weighs_every_token(self) -> bool:
        """Whether tokens of advantage 0 have a loss, too; if not, the update leaves out trajectories without weight."""
        return self.kl_loss_coef != 0 or self.entropy_coef != 0

    @property
    def updates_actor(self) -> bool:
        """Whether this iteration's steps move the actor."""
        return True

    def needs_old_logprobs(self, experience: Experience) -> bool:
        """Whether a pass scores them before the update; with one update per iteration they are the current ones."""
        if self._corrector.bypass:
            return False
        return self._corrector.normalize or sum(len(one_pass) for one_pass in experience.plan.mini_batches) > 1

    def score_more(self, experience: Experience) -> None:
        """Score further columns, with `score_column`, before the advantages are computed."""

    # Lightning's hooks.

    def setup(self, stage: str) -> None:
        """Start anew: a fit that ended in the middle of an iteration has left something."""
        super().setup(stage)
        if stage == "fit":
            self.metrics.compute()
            if isinstance(self.trainer.strategy, DeepSpeedStrategy):
                self.trainer.strategy.set_clipping(self.max_grad_norms)
            self._guarded_step.num_skipped_in_a_row = 0

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
        weighted, num_micro_batches = self._weighted_micro_batches(batch)
        self.metrics.count("actor/skipped_weightless_steps", 0.0 if num_micro_batches else 1.0)
        if num_micro_batches:
            self._step(batch, weighted, num_micro_batches)
        phase.advance(1)
        if batch.is_last:
            self._finish_iteration(batch.experience)

    # The steps of an iteration.

    def score(self, experience: Experience) -> None:
        """Compute what the updates need of the networks as they are now: log-probs, then advantages."""
        experience.phase.start("scoring")
        if self.needs_old_logprobs(experience):
            self.score_column("old_logprobs", experience, self._current_logprobs, timer="old_log_prob")
            self._corrector.measure(experience, self.sum_over_ranks)
        if self.reference is not None:
            self.score_column("ref_logprobs", experience, self._reference_logprobs, timer="ref")
        self.score_more(experience)
        started = time.perf_counter()
        advantages = self.compute_advantages(experience)
        experience.advantages = advantages.detach().float()
        experience.is_scored = True
        self.metrics.mean("timing_s/adv", time.perf_counter() - started)
        share = zero_spread_share(experience.rewards, experience.group_ids)
        self.metrics.mean("critic/zero_spread_group_share", share)
        if experience.advantages.numel():
            self.metrics.mean("critic/advantages/mean", experience.advantages.mean())
            self.metrics.maximum("critic/advantages/max", experience.advantages.max())

    def score_column(
        self, name: str, experience: Experience, compute: Callable[[MicroBatch], Tensor], *, timer: str
    ) -> None:
        """Fill a column of the experience, without gradient, from ``[B, T]`` values per micro-batch.

        The micro-batches are those of the first pass: equal rows give equal numbers, and a first ratio of 1.
        """
        started = time.perf_counter()
        # Hooks outside training_step have no precision context of their own (Lightning 2.6).
        with torch.no_grad(), self.trainer.precision_plugin.train_step_context():
            for index in range(len(experience.plan.mini_batches[0])):
                mini_batch = MiniBatch(experience, 0, index, self.global_rank).to(self.device)
                for micro_batch, _ in mini_batch.micro_batches():
                    experience.store(name, micro_batch.positions, compute(micro_batch))
        self.metrics.mean(f"timing_s/{timer}", time.perf_counter() - started)

    def _current_logprobs(self, batch: MicroBatch) -> Tensor:
        return self.forward_actor(batch, with_entropy=False).logprobs

    def _reference_logprobs(self, batch: MicroBatch) -> Tensor:
        assert self.reference is not None
        return self.reference.to(self.device).score(batch.packed, batch.temperature)

    def _weighted_micro_batches(self, batch: MiniBatch) -> tuple[list[list[int]], int]:
        """Return this rank's micro-batches that can move the weights, and how many every rank runs.

        None is run where the loss moves nothing: AdamW's momentum would move the weights on a zero gradient too.
        """
        if batch.plan.num_loss_tokens == 0:
            return [], 0
        if self.weighs_every_token:
            return batch.indices, len(batch.indices)
        weighted = batch.weighted_indices()
        # Agreed upon, not computed by each rank: ranks on different processors may round an advantage to 0 or not.
        return weighted, int(self.max_over_ranks(torch.tensor(len(weighted))))

    def _step(self, batch: MiniBatch, weighted: list[list[int]], num_micro_batches: int) -> None:
        """Forward, backward, clip and step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self._losses = {"actor/pg_loss": torch.zeros((), device=self.device)}
        for micro_batch, is_last in batch.micro_batches(weighted, at_least=num_micro_batches):
            with self.gradient_sync(is_last):
                # Strategies average gradients over ranks; the summands of all ranks make the mini-batch's loss.
                self.manual_backward(self.micro_batch_loss(micro_batch, batch) * self.trainer.world_size)
        losses = self.sum_over_ranks(torch.stack([loss.double() for loss in self._losses.values()]))
        frozen = () if self.updates_actor else ("actor",)
        strategy = self.trainer.strategy
        engine = strategy if isinstance(strategy, DeepSpeedStrategy) else None
        norms = self._guarded_step.step(optimizer, losses.sum(), frozen, engine)
        if norms is None:
            self.metrics.count("actor/skipped_not_finite_steps")
            return
        self.steps_since_sync += self.updates_actor
        for name, loss in zip(self._losses, losses, strict=True):
            self.metrics.mean(name, loss)
        for name, norm in norms.items():
            self.metrics.mean(f"{name}/grad_norm", norm)
            self.metrics.maximum(f"{name}/grad_norm_max", norm)

    def note_loss(self, name: str, loss: Tensor) -> Tensor:
        """Add a micro-batch's summand to a loss that is logged as a mean over optimizer steps; returns it."""
        summand = loss.detach()
        self._losses[name] = self._losses[name] + summand if name in self._losses else summand
        return loss

    def micro_batch_loss(self, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        """Loss summand of a micro-batch: summed over the mini-batch's micro-batches it is the mini-batch's loss."""
        scores = self.forward_actor(batch, with_entropy=self.entropy_coef != 0)
        logprobs, mask = scores.logprobs, batch.loss_mask
        if self._corrector.bypass:
            batch.old_logprobs = batch.rollout_logprobs
        elif batch.old_logprobs is None:
            batch.old_logprobs = logprobs.detach()
        token_loss = self._corrector.token_loss(logprobs, batch, self.policy_loss)
        loss = self.note_loss("actor/pg_loss", self.aggregate(token_loss, batch, mini_batch))
        if self.entropy_coef != 0:
            assert scores.entropies is not None
            loss = loss - self.entropy_coef * self.aggregate(scores.entropies, batch, mini_batch)
        if self.kl_loss_coef != 0:
            assert batch.ref_logprobs is not None
            kl = kl_penalty(logprobs, batch.ref_logprobs, self.kl_loss_type)
            loss = loss + self.kl_loss_coef * self.aggregate(kl, batch, mini_batch)
            self.metrics.mean("actor/kl_loss", masked_mean(kl.detach(), mask), mask.sum())
        self._record(logprobs.detach(), scores.entropies, batch, mini_batch)
        return loss

    def aggregate(self, token_values: Tensor, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        """Scalar summand of the mini-batch's loss from ``[B, T]`` values, in the configured mode."""
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
        if mini_batch.is_first and not self._corrector.bypass:
            deviation = masked_mean(((logprobs - batch.old_logprobs).exp() - 1).abs(), mask)
            self.metrics.mean("actor/first_ratio_deviation", deviation, num_tokens)
        if mini_batch.epoch == 0:
            trainer_logprobs = logprobs if self._corrector.bypass else batch.old_logprobs
            gaps = mismatch_metrics(trainer_logprobs, batch.rollout_logprobs, mask)
            self.metrics.maximum("rollout_corr/logprob_gap_max", gaps.pop("rollout_corr/logprob_gap_max"))
            for name, value in gaps.items():
                self.metrics.mean(name, value, num_tokens)

    def _finish_iteration(self, experience: Experience) -> None:
        """Advance the version and log the iteration."""
        groups = self.optimizers().param_groups  # type: ignore[union-attr]
        self.policy_version += 1
        self.metrics.mean("timing_s/update_actor", time.perf_counter() - self._update_started)
        metrics = experience.metrics | self.metrics.compute(self.gather_over_ranks)
        metrics |= {f"{group['name']}/lr": float(group["lr"]) for group in groups}
        self._warn(metrics)
        self.log_iteration(metrics)

    def _warn(self, metrics: dict[str, float]) -> None:
        """Say what a person should look at; every rank has the same numbers."""
        if not self.trainer.is_global_zero:
            return
        gap = metrics.get("rollout_corr/logprob_gap_mean", 0.0)
        if gap > self.logprob_gap_warning:
            log.warning(
                "Iteration %d: the engine's log-probs differ from the trainer's by %.3f nats per token on average "
                "(warning above model.logprob_gap_warning=%s). Sampling and training see different policies; "
                "model.rollout_correction=token-tis corrects it.",
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
