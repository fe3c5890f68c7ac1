"""Whole fits of the 3 M parameter model in this process, seconds each, and what they leave to look at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger

from lit_rl import GRPO, RolloutDataModule
from lit_rl.agents import AgentSettings
from lit_rl.callbacks import WeightSync
from lit_rl.data import Arithmetic
from lit_rl.rewards import RewardSettings
from lit_rl.serving import ServingSettings
from lit_rl.types import Trajectory

MODEL = "bundled/tiny-random"


def spread_reward(solution_str: str, ground_truth: str) -> float:
    """A random model is never right; this one differs from answer to answer, and is the same for the same answer."""
    return sum(solution_str.encode()) % 5 / 4


def tiny_data(
    reward: Callable[..., Any] = spread_reward, serving: dict[str, Any] | None = None, **changes: Any
) -> RolloutDataModule:
    """Two prompts of four samples and six tokens, inline.

    One sequence per engine batch, one worker of each kind: what is computed does not depend on who was first.
    """
    settings: dict[str, Any] = {
        "model_name": MODEL,
        "train_data": Arithmetic(split="train", num_rows=12, max_operand=9),
        "val_data": Arithmetic(split="val", num_rows=3, max_operand=9),
        "prompts_per_iteration": 2,
        "group_size": 4,
        "max_prompt_tokens": 64,
        "max_response_tokens": 6,
        "max_tokens_per_micro_batch": 256,
        "agents": AgentSettings(num_workers=1),
        "rewards": RewardSettings(function=reward, num_workers=1),
        "serving": ServingSettings(
            **{"replica": "transformers", "dtype": "float32", "max_num_seqs": 1, **(serving or {})}
        ),
        "backend": "inline",
    }
    return RolloutDataModule(**(settings | changes))


class MemoryLogger(Logger):
    """Keeps what was logged: ``(step, metrics)`` in order."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((-1 if step is None else step, dict(metrics)))

    def column(self, name: str) -> list[tuple[int, float]]:
        """``(step, value)`` wherever ``name`` was logged."""
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


class Recorder(L.Callback):
    """Keeps each iteration's trajectories and the norm of each gradient that a step used."""

    def __init__(self) -> None:
        self.iterations: list[list[Trajectory]] = []
        self.clipped_norms: list[float] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.iterations.append(trainer.datamodule.last_trajectories)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        squares = [float(p.grad.square().sum()) for p in pl_module.parameters() if p.grad is not None]
        self.clipped_norms.append(math.sqrt(sum(squares)))


@dataclass
class TinyFit:
    """A trainer that is ready to fit, and what comes of it."""

    data: RolloutDataModule
    module: GRPO
    trainer: L.Trainer
    logger: MemoryLogger
    recorder: Recorder
    started_with: dict[str, torch.Tensor] = field(default_factory=dict)

    def fit(self, ckpt_path: str | None = None) -> TinyFit:
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=ckpt_path)
        return self

    @property
    def iterations(self) -> list[list[Trajectory]]:
        return self.recorder.iterations

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


def tiny_fit(
    iterations: int = 2,
    *,
    data: RolloutDataModule | None = None,
    module: GRPO | None = None,
    callbacks: Sequence[L.Callback] = (),
    sync: Sequence[L.Callback] | None = None,
    **trainer_options: Any,
) -> TinyFit:
    logger, recorder = MemoryLogger(), Recorder()
    is_checkpointing = any(isinstance(callback, L.pytorch.callbacks.Checkpoint) for callback in callbacks)
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "precision": "32-true",
        "max_epochs": iterations,
        "check_val_every_n_epoch": 1000,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "logger": logger,
        "enable_checkpointing": is_checkpointing,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [*([WeightSync()] if sync is None else sync), *callbacks, recorder],
    }
    trainer = L.Trainer(**(options | trainer_options))
    return TinyFit(data or tiny_data(), module or GRPO(MODEL, actor_lr=1e-3), trainer, logger, recorder)
