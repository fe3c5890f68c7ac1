"""What a rank does in the tests of updates on several ranks: its share of given trajectories, one fit per case."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

import lit_rl
from lit_rl.callbacks import IterationCheckpoint
from lit_rl.experience.loader import ExperienceLoader
from lit_rl.experience.share import PlanSettings, Rollout, SequenceScalars
from lit_rl.strategies import DeepSpeedStrategy
from lit_rl.weight_sync.source import stream_weights

BUCKET_BYTES = 1 << 12


@dataclass(kw_only=True)
class Case:
    """One fit: a module by class name and options, on one rollout per iteration."""

    module: str
    options: dict[str, Any]
    rollouts: list[Rollout]
    settings: PlanSettings
    poison: tuple[int, float] | None = None
    """Rank whose policy loss is multiplied by a number in every iteration but the last."""
    iterations: int | None = None
    """Where not all rollouts are learnt from."""
    save_in: str | None = None
    """Folder that the last iteration's checkpoint is written to."""
    resume: str | None = None
    """Checkpoint to go on from."""


@dataclass(kw_only=True)
class Outcome:
    """What a rank has after a fit."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    weights_by_iteration: list[dict[str, torch.Tensor]] = field(default_factory=list)
    mini_batches: list[list[int]] = field(default_factory=list)
    num_held: int = 0
    num_buckets: int = 0
    largest_bucket: int = 0
    global_step: int = 0


def rollout_of(trajectories, iteration: int = 0, temperature: float = 1.0) -> Rollout:
    """A rollout of given trajectories, as the collector makes it."""
    numbers = {g: i for i, g in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    groups = [numbers[t.group_id] for t in trajectories]
    return Rollout(
        scalars=SequenceScalars(
            iteration=iteration, temperature=temperature, plan_seed=7 + iteration,
            lengths=[t.length for t in trajectories], prompt_lengths=[len(t.prompt_ids) for t in trajectories],
            loss_tokens=[t.num_loss_tokens for t in trajectories], rewards=[t.reward for t in trajectories],
            group_ids=groups, prompt_groups=groups, greedy_rewards=None, metrics={},
        ),
        sequences=list(trajectories),
    )  # fmt: skip


class _Watch(Callback):
    def __init__(self, outcome: Outcome, *, gradients: bool) -> None:
        self.outcome = outcome
        self.keeps_gradients = gradients

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if self.keeps_gradients:
            self.outcome.gradients.append(
                {n: full(p.grad if p.grad is not None else torch.zeros_like(p)) for n, p in module.named_parameters()}
            )

    def on_train_epoch_end(self, trainer, module):
        self.outcome.metrics.append({n: float(v) for n, v in trainer.callback_metrics.items() if n != "timing_s/step"})
        self.outcome.weights_by_iteration.append(all_weights(module))

    def on_train_end(self, trainer, module):
        self.outcome.weights = all_weights(module, self.outcome)
        self.outcome.global_step = trainer.global_step


def full(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def all_weights(module, outcome: Outcome | None = None) -> dict[str, torch.Tensor]:
    """Actor's and critic's, in buckets of a few tensors."""
    networks = {"actor": module.actor.network} | ({"critic": module.critic} if hasattr(module, "critic") else {})
    weights = {}
    for part, network in networks.items():
        for bucket in stream_weights(network, BUCKET_BYTES, torch.float32):
            weights |= {f"{part}.{name}": tensor.clone() for name, tensor in bucket}
            if outcome is not None:
                outcome.num_buckets += 1
                outcome.largest_bucket = max(outcome.largest_bucket, sum(tensor.nbytes for _, tensor in bucket))
    return weights


def update(cases: list[Case], strategy: Any = "auto", **trainer_options: Any) -> list[Outcome]:
    """Run every case on this rank."""
    return [_fit(case, strategy() if callable(strategy) else strategy, trainer_options) for case in cases]


def _fit(case: Case, strategy: Any, trainer_options: dict[str, Any]) -> Outcome:
    torch.manual_seed(0)
    outcome = Outcome()
    module = getattr(lit_rl, case.module)(**case.options)
    is_deepspeed = isinstance(strategy, DeepSpeedStrategy)
    saving = [] if case.save_in is None else [IterationCheckpoint(dirpath=case.save_in)]
    trainer = L.Trainer(
        accelerator="cpu", devices=_world_size(), strategy=strategy, logger=False, enable_progress_bar=False,
        max_epochs=case.iterations or len(case.rollouts), enable_model_summary=False,
        enable_checkpointing=case.save_in is not None, callbacks=[*saving, _Watch(outcome, gradients=not is_deepspeed)],
        **trainer_options,
    )  # fmt: skip
    if case.poison is not None and trainer.global_rank == case.poison[0]:
        _poison(module, case.poison[1], len(case.rollouts))

    def collect():
        rollout = case.rollouts[trainer.current_epoch]
        # Every rank deals for itself here; how shares travel is tested where they do.
        share = list(rollout.deal(case.settings, trainer.world_size))[trainer.global_rank]
        experience = share.experience(case.settings, trainer.world_size)
        outcome.num_held = len(experience)
        outcome.mini_batches += [
            [i for rank in mini.micro_batches for indices in rank for i in indices]
            for one_pass in experience.plan.mini_batches
            for mini in one_pass
        ]
        return experience

    settings = case.settings
    loader = ExperienceLoader(collect, settings.ppo_epochs, settings.num_mini_batches, trainer.global_rank)
    trainer.fit(module, train_dataloaders=loader, ckpt_path=case.resume)
    return outcome


def _poison(module, factor: float, iterations: int) -> None:
    original = module.policy_loss

    def policy_loss(logprobs, batch):
        loss = original(logprobs, batch)
        return loss * factor if module.current_epoch < iterations - 1 else loss

    module.policy_loss = policy_loss


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
