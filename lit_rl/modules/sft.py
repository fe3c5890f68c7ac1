"""Supervised fine-tuning on demonstrations: the warm-up before RL, with the same networks, optimizer and checkpoints.

Position in the flow: conversation loader -> **training_step** (one optimizer step) -> checkpoint. The loss is the mean
over all learned tokens of an optimizer step, whatever the packing and the number of micro-batches. How conversations
become tokens and masks is said in `lit_rl.data.conversation_tokens`.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from lit_rl.experience.conversations import ConversationBatch, ConversationMicroBatch
from lit_rl.metrics.policy import PolicyMetrics
from lit_rl.modules.optimizer_step import GuardedStep
from lit_rl.modules.option_ranges import check_choice, check_number
from lit_rl.modules.policy_module import PolicyModule

_SCHEDULES = ("constant", "linear", "cosine")


class SFT(PolicyModule):
    """Learns the assistant's turns of conversations by maximum likelihood."""

    batch_class = ConversationBatch

    def __init__(
        self,
        model_name: str,
        actor_lr: float = 1e-5,
        lr_schedule: str = "constant",
        lr_warmup_steps: int = 0,
        min_lr_share: float = 0.0,
        max_grad_norm: float = 1.0,
        max_skipped_steps: int = 10,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Network to train: a bundled name, a hub id, or a folder.
            actor_lr: Learning rate of AdamW, above 0.
            lr_schedule: What it does after the warm-up until the last step of ``trainer.max_epochs``: ``constant``,
                ``linear`` (down), or ``cosine``.
            lr_warmup_steps: Optimizer steps over which the learning rate rises linearly to ``actor_lr``.
            min_lr_share: Share of ``actor_lr`` at which ``linear`` and ``cosine`` end, in [0, 1].
            max_grad_norm: Largest norm of the gradient; larger ones are scaled down to it.
            max_skipped_steps: Stop the run after this many optimizer steps in a row with a loss or gradient that is not
                finite.
            kwargs: Options of `PolicyModule`.
        """
        super().__init__(model_name, actor_lr=actor_lr, **kwargs)
        check_choice("lr_schedule", lr_schedule, _SCHEDULES)
        check_number("lr_warmup_steps", lr_warmup_steps, at_least=0)
        check_number("min_lr_share", min_lr_share, at_least=0, at_most=1)
        check_number("max_grad_norm", max_grad_norm, above=0)
        check_number("max_skipped_steps", max_skipped_steps, at_least=1)
        self.lr_schedule = lr_schedule
        self.lr_warmup_steps = lr_warmup_steps
        self.min_lr_share = min_lr_share
        self.metrics = PolicyMetrics()
        self._guarded_step = GuardedStep({"actor": max_grad_norm}, max_skipped_steps)
        self._sums: dict[str, Tensor] = {}

    # Lightning's hooks.

    def setup(self, stage: str) -> None:
        """Start anew: a fit that ended in the middle of an iteration has left something."""
        super().setup(stage)
        if stage != "fit":
            return
        self.metrics.compute()
        self._guarded_step.num_skipped_in_a_row = 0
        if self.lr_schedule != "constant" and (self.trainer.max_epochs or -1) < 0:
            raise ValueError(
                f"model.lr_schedule={self.lr_schedule!r} ends with the last iteration: set trainer.max_epochs, or use "
                "'constant'."
            )

    def training_step(self, batch: ConversationBatch, batch_idx: int) -> None:
        """Learn from one mini-batch: one optimizer step."""
        if batch.is_first:
            batch.phase.start("update", total=batch.num_steps)
            self._update_started = time.perf_counter()
        self._set_learning_rate(batch)
        self._step(batch)
        batch.phase.advance(1)
        if batch.is_last:
            self._finish_iteration()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measure loss and accuracy on held-out conversations; rollouts are measured as for any policy."""
        if not isinstance(batch, ConversationBatch):
            super().validation_step(batch, batch_idx)
            return
        for micro_batch, _ in batch.micro_batches():
            scores = self.forward_actor(micro_batch, with_entropy=False, with_most_likely=True)
            assert scores.is_most_likely is not None
            self._add("loss", _loss_sum(scores.logprobs, micro_batch))
            self._add("hits", (scores.is_most_likely * micro_batch.loss_mask).sum())
            self._add("tokens", micro_batch.loss_mask.sum())

    def on_validation_epoch_end(self) -> None:
        """Log the means over all tokens of the validation."""
        sums, self._sums = self._sums, {}
        if not sums:
            return
        values = {
            "val/loss": float(sums["loss"] / sums["tokens"]),
            "val/token_accuracy": float(sums["hits"] / sums["tokens"]),
            "step": float(self.policy_version),
        }
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    # The steps of an iteration.

    def step_factor(self, step: int, num_steps: int) -> float:
        """Share of the learning rate in an optimizer step.

        Args:
            step: From 0, over the whole run.
            num_steps: Of the whole run; read by schedules that end with it.
        """
        warmup = min(1.0, (step + 1) / (self.lr_warmup_steps + 1))
        if self.lr_schedule == "constant" or step < self.lr_warmup_steps:
            return warmup
        progress = (step - self.lr_warmup_steps) / max(num_steps - 1 - self.lr_warmup_steps, 1)
        left = 1 - progress if self.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_share + (1 - self.min_lr_share) * left

    def _set_learning_rate(self, batch: ConversationBatch) -> None:
        # Counted from the iteration, so that a resumed run needs no state for it.
        step = self.current_epoch * batch.num_steps + batch.index
        factor = self.step_factor(step, (self.trainer.max_epochs or 0) * batch.num_steps)
        factor *= self.learning_rate_factor(self.current_epoch)
        for group in self.optimizers().param_groups:  # type: ignore[union-attr]
            group["lr"] = group["base_lr"] * factor

    def _step(self, batch: ConversationBatch) -> None:
        """Forward, backward, clip and step."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for micro_batch, _ in batch.micro_batches():
            scores = self.forward_actor(micro_batch, with_entropy=False)
            loss = _loss_sum(scores.logprobs, micro_batch) / batch.plan.num_loss_tokens
            self.manual_backward(loss)
            total += loss.detach()
        norms = self._guarded_step.step(optimizer, total)
        if norms is None:
            self.metrics.count("train/skipped_not_finite_steps")
            return
        self.steps_since_sync += 1
        self.metrics.mean("train/loss", total, float(batch.plan.num_loss_tokens))
        self.metrics.mean("train/grad_norm", norms["actor"])
        self.metrics.count("train/num_loss_tokens", float(batch.plan.num_loss_tokens))
        self.metrics.count("train/num_tokens", float(batch.num_tokens))

    def _finish_iteration(self) -> None:
        """Advance the version and log the iteration."""
        self.policy_version += 1
        seconds = time.perf_counter() - self._update_started
        metrics = self.metrics.compute()
        metrics["train/tokens_per_s"] = metrics.get("train/num_tokens", 0.0) / seconds
        metrics["train/lr"] = float(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        metrics["timing_s/update_actor"] = seconds
        self.log_iteration(metrics)

    def _add(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name] + value.detach() if name in self._sums else value.detach()


def _loss_sum(logprobs: Tensor, batch: ConversationMicroBatch) -> Tensor:
    """Negative log-likelihood of a micro-batch's learned tokens, in nats, summed."""
    return -(logprobs * batch.loss_mask).sum()
