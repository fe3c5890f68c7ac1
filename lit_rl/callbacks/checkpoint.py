"""Checkpoints at the end of iterations, and nowhere else.

A checkpoint inside an iteration would resume into a new rollout's second half. So this callback saves when an
iteration is complete (after its weight sync and validation), never on an exception, and writes so that a failure
half-way leaves the last good checkpoint and the link to it as they were: aside, flushed to disk, then renamed. The
final name therefore is the mark of completeness; ``*.partial`` is ignored and swept up. Retention goes by what lies on
disk, not by what the process remembers.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lit_rl.callbacks.checkpoint_files import (
    PARTIAL,
    StreamingCheckpointIO,
    flush,
    link_last,
    remove,
    replace_checkpoint,
)
from lit_rl.callbacks.instance_expiry import expires_soon
from lit_rl.callbacks.iteration_metrics import scored_version
from lit_rl.callbacks.random_states import collect_random_states, restore_random_states
from lit_rl.run_folder import CHECKPOINTS, iteration_checkpoints, last_checkpoint

log = logging.getLogger(__name__)

_RANDOM_STATES = "lit_rl_random_states"


class IterationCheckpoint(ModelCheckpoint):
    """Save whole iterations: without ``monitor`` the newest and ``last.ckpt``, with it the best by a validation metric.

    Args:
        monitor: Validation metric to judge by, such as ``val-core/arithmetic/reward/mean@1``; ``None``: the newest.
        mode: ``max`` or ``min`` of the metric is best.
        keep: How many to keep, at least 1; -1 keeps all.
        every_n_iterations: Iterations between saves, at least 1. The last iteration of a run is saved in any case, and
            so is one after which the machine's capacity block ends too soon for another (see `expires_soon`). With
            ``monitor``, only iterations with a validation count.
        dirpath: Folder; ``None`` is ``checkpoints/`` in the run folder.
        save_weights_only: Leave out optimizer and loop state; such a checkpoint cannot be resumed.
        expiry_margin_s: Seconds before the end of a capacity block that are kept free beside the longest iteration so
            far and a minute for saving, at least 0.
        every_n_train_steps: Refused: an optimizer step lies inside an iteration.
        train_time_interval: Refused: a moment lies inside an iteration.

    Raises:
        ValueError: If one of the refused options is given, or a number is out of range.
    """

    def __init__(
        self,
        monitor: str | None = None,
        mode: str = "max",
        keep: int = 1,
        every_n_iterations: int = 1,
        dirpath: str | None = None,
        save_weights_only: bool = False,
        expiry_margin_s: float = 0.0,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
    ) -> None:
        for option, value in (
            ("every_n_train_steps", every_n_train_steps),
            ("train_time_interval", train_time_interval),
        ):
            if value is not None:
                raise ValueError(
                    f"IterationCheckpoint.{option}={value} would save inside an iteration, which cannot be resumed. "
                    "Use every_n_iterations."
                )
        if keep == 0 or keep < -1 or every_n_iterations < 1:
            raise ValueError(
                f"IterationCheckpoint: keep={keep} must be -1 or at least 1, "
                f"every_n_iterations={every_n_iterations} at least 1."
            )
        if not expiry_margin_s >= 0:
            raise ValueError(f"IterationCheckpoint.expiry_margin_s={expiry_margin_s} must be at least 0 (seconds).")
        super().__init__(
            dirpath=dirpath,
            filename="best_iteration_{iteration:05d}",
            monitor=monitor,
            mode=mode,
            save_top_k=keep if monitor is not None else -1,
            save_weights_only=save_weights_only,
            auto_insert_metric_name=False,
            every_n_epochs=every_n_iterations,
            save_on_train_epoch_end=True,
        )
        self.keep = keep
        self.expiry_margin_s = expiry_margin_s
        self._validated_iteration = -1
        self._restored_random_states: dict[str, Any] | None = None
        self._iteration_started = 0.0
        self._longest_iteration_s = 0.0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the folder, and write files piece by piece."""
        if self.dirpath is None:
            self.dirpath = os.path.join(trainer.default_root_dir, CHECKPOINTS)
        # A plugin the user chose, or a strategy that writes folders, keeps its own way.
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = StreamingCheckpointIO()
        super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the random states, one entry per rank."""
        own = collect_random_states(trainer.strategy.root_device)
        everyone = [own] * trainer.world_size
        if trainer.world_size > 1:
            torch.distributed.all_gather_object(everyone, own)
        checkpoint[_RANDOM_STATES] = everyone

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Look for the place in the training rows, and note this rank's random states for the start.

        Raises:
            ValueError: If the checkpoint is of another data module, whose place Lightning would leave out silently.
        """
        data = trainer.datamodule  # type: ignore[attr-defined]
        name = type(data).__qualname__
        if data is not None and data.state_dict() and name not in checkpoint:
            others = [key for key, value in checkpoint.items() if isinstance(value, dict) and "cursor" in value]
            raise ValueError(
                f"The checkpoint has no place in the training rows for the data module {name}; it has one for "
                f"{', '.join(others) or 'none'}. Resume with the class that wrote it: the rows would begin anew."
            )
        states = checkpoint.get(_RANDOM_STATES, [])
        self._restored_random_states = states[trainer.global_rank] if trainer.global_rank < len(states) else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the random states back, after everything that drew from them while the run started."""
        if self._restored_random_states is not None:
            restore_random_states(self._restored_random_states, trainer.strategy.root_device)
            self._restored_random_states = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time the iteration."""
        self._iteration_started = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which iteration has a score; saving waits for its end."""
        if not trainer.sanity_checking:
            # Iteration i makes version i + 1; the validation before training, of version 0, belongs to none.
            self._validated_iteration = scored_version(pl_module) - 1

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: a mini-batch is no place to save."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: the last complete iteration is saved already."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the iteration that has just ended.

        Raises:
            RuntimeError: If it cannot be written; names the last good checkpoint, which is intact.
        """
        # A run stopped inside an iteration gets here too, without its last mini-batch.
        if trainer.state.fn != TrainerFn.FITTING or not trainer.is_last_batch:
            return
        self._longest_iteration_s = max(self._longest_iteration_s, time.monotonic() - self._iteration_started)
        iteration = trainer.current_epoch
        if self.monitor is not None:
            if self._validated_iteration == iteration:
                self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            return
        if not self._is_due(trainer, iteration):
            return
        path = Path(str(self.dirpath)) / f"iteration_{iteration:05d}.ckpt"
        self._save_checkpoint(trainer, str(path))
        self.best_model_path = self.last_model_path = str(path)
        if trainer.is_global_zero:
            link_last(path)
            self._remove_older(path)
        trainer.strategy.barrier("IterationCheckpoint")

    def _is_due(self, trainer: Trainer, iteration: int) -> bool:
        """Whether to save now; the same on every rank."""
        is_last = trainer.should_stop or iteration + 1 == trainer.max_epochs
        if is_last or (iteration + 1) % self._every_n_epochs == 0:
            return True
        is_ending: bool = trainer.strategy.broadcast(expires_soon(self._longest_iteration_s, self.expiry_margin_s))
        if is_ending and trainer.is_global_zero:
            log.warning("Iteration %d is saved out of turn: the machine's capacity block ends soon.", iteration)
        return is_ending

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the best scores, of those whose files still exist; a resumed run writes into a folder of its own.

        Args:
            state_dict: From the checkpoint.
        """
        best = {path: score for path, score in state_dict["best_k_models"].items() if os.path.exists(path)}
        here = {**state_dict, "dirpath": self.dirpath, "best_k_models": best}
        if not best:
            here["best_model_score"], here["kth_best_model_path"] = None, ""
        super().load_state_dict(here)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        candidates = super()._monitor_candidates(trainer)
        # Logged numbers are floats, which a file name cannot take as an integer.
        candidates["iteration"] = torch.tensor(trainer.current_epoch)
        return candidates

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Write aside, flush, rename; on failure say what is kept."""
        target = Path(filepath)
        aside = target.with_name(target.name + PARTIAL)
        try:
            super()._save_checkpoint(trainer, str(aside))
            if trainer.is_global_zero:
                flush(aside)
                replace_checkpoint(aside, target)
                flush(target.parent)
        except (OSError, RuntimeError) as error:
            if trainer.is_global_zero:
                remove(aside)
            last = last_checkpoint(target.parent)
            kept = f"The last good checkpoint is intact: {last.resolve()}." if last else "No earlier checkpoint exists."
            free_gb = shutil.disk_usage(target.parent).free / 1e9
            raise RuntimeError(
                f"Could not save checkpoint {target} ({free_gb:.2f} GB free there): {error}. {kept} "
                "Free space, or set runs_dir to another disk, and resume."
            ) from error
        trainer.strategy.barrier("IterationCheckpoint")
        self._last_checkpoint_saved = filepath

    def _remove_older(self, saved: Path) -> None:
        """Keep the newest ``keep`` on disk, whichever process wrote them, and sweep up what was cut short."""
        for left_over in saved.parent.glob(f"*{PARTIAL}"):
            remove(left_over)
        if self.keep > 0:
            complete = iteration_checkpoints(saved.parent)
            # Later iterations are of a run that was gone back from, or of another one: not this one's to remove.
            for old in complete[: complete.index(saved) + 1][: -self.keep]:
                remove(old)
