"""Checkpoints at the end of iterations, and nowhere else.

A checkpoint inside an iteration would resume into a new rollout's second half. So this callback saves when an
iteration is complete (after its weight sync and validation), never on an exception, and writes so that a failure
half-way leaves the last good checkpoint and the link to it as they were: aside, flushed to disk, then renamed. The
final name therefore is the mark of completeness; ``*.partial`` is ignored and swept up. Retention goes by what lies on
disk, not by what the process remembers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from lit_rl.callbacks.iteration_metrics import scored_version
from lit_rl.run_folder import CHECKPOINTS, LAST_CHECKPOINT, iteration_checkpoints, last_checkpoint

PARTIAL = ".partial"
"""Ending of a checkpoint that is being written."""


class StreamingCheckpointIO(TorchCheckpointIO):
    """Write a checkpoint file piece by piece.

    Lightning's plugin builds the whole file in memory, twice (2.6): with AdamW's state that doubles the process.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write and flush one file, under a partial name until it is complete.

        Args:
            checkpoint: What `torch.save` accepts.
            path: Local file.
            storage_options: Not supported.

        Raises:
            TypeError: If ``storage_options`` is given.
        """
        if storage_options is not None:
            raise TypeError("StreamingCheckpointIO takes no storage_options.")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target if target.name.endswith(PARTIAL) else target.with_name(target.name + PARTIAL)
        try:
            with aside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        os.replace(aside, target)


class IterationCheckpoint(ModelCheckpoint):
    """Save whole iterations: without ``monitor`` the newest and ``last.ckpt``, with it the best by a validation metric.

    Args:
        monitor: Validation metric to judge by, such as ``val-core/arithmetic/reward/mean@1``; ``None``: the newest.
        mode: ``max`` or ``min`` of the metric is best.
        keep: How many to keep, at least 1; -1 keeps all.
        every_n_iterations: Iterations between saves, at least 1. The last iteration of a run is saved in any case. With
            ``monitor``, only iterations with a validation count.
        dirpath: Folder; ``None`` is ``checkpoints/`` in the run folder.
        save_weights_only: Leave out optimizer and loop state; such a checkpoint cannot be resumed.
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
        self._validated_iteration = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Choose the folder, and write files piece by piece."""
        if self.dirpath is None:
            self.dirpath = os.path.join(trainer.default_root_dir, CHECKPOINTS)
        # A plugin the user chose, or a strategy that writes folders, keeps its own way.
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = StreamingCheckpointIO()
        super().setup(trainer, pl_module, stage)

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
        iteration = trainer.current_epoch
        if self.monitor is not None:
            if self._validated_iteration == iteration:
                self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            return
        is_last = trainer.should_stop or iteration + 1 == trainer.max_epochs
        if (iteration + 1) % self._every_n_epochs and not is_last:
            return
        path = Path(str(self.dirpath)) / f"iteration_{iteration:05d}.ckpt"
        self._save_checkpoint(trainer, str(path))
        self.best_model_path = self.last_model_path = str(path)
        if trainer.is_global_zero:
            _link_last(path)
            self._remove_older(path.parent)
        trainer.strategy.barrier("IterationCheckpoint")

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
                _flush(aside)
                _remove(target)
                os.replace(aside, target)
                _flush(target.parent)
        except (OSError, RuntimeError, CheckpointException) as error:
            if trainer.is_global_zero:
                _remove(aside)
            last = last_checkpoint(target.parent)
            kept = f"The last good checkpoint is intact: {last.resolve()}." if last else "No earlier checkpoint exists."
            free_gb = shutil.disk_usage(target.parent).free / 1e9
            raise RuntimeError(
                f"Could not save checkpoint {target} ({free_gb:.2f} GB free there): {error}. {kept} "
                "Free space, or set runs_dir to another disk, and resume."
            ) from error
        trainer.strategy.barrier("IterationCheckpoint")
        self._last_checkpoint_saved = filepath

    def _remove_older(self, folder: Path) -> None:
        """Keep the newest ``keep`` on disk, whichever process wrote them, and sweep up what was cut short."""
        for left_over in folder.glob(f"*{PARTIAL}"):
            _remove(left_over)
        if self.keep > 0:
            for old in iteration_checkpoints(folder)[: -self.keep]:
                _remove(old)


def _link_last(path: Path) -> None:
    """Point ``last.ckpt`` to a complete checkpoint, in one step."""
    aside = path.with_name(LAST_CHECKPOINT + PARTIAL)
    aside.unlink(missing_ok=True)
    # A file system without links still has the newest iteration by its name.
    with contextlib.suppress(OSError):
        aside.symlink_to(path.name)
        os.replace(aside, path.with_name(LAST_CHECKPOINT))


def _flush(path: Path) -> None:
    """Have the disk hold a file, or a folder and the files in it, before anything relies on it."""
    for entry in [*(path.rglob("*") if path.is_dir() and path.name.endswith(PARTIAL) else ()), path]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
