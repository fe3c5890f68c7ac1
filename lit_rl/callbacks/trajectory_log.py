"""Sampled trajectories as JSON lines: what the model was asked, what it answered and how that was scored.

One file per iteration and per validation in the run folder's ``trajectories/``. The columns begin with those of verl's
dumps (``input``, ``output``, ``gts``, ``score``, ``step``) and go on with what those lose: reward parts, stop reason,
weight versions, errors. Which trajectories are kept is decided by a hash of the row, so that the same rows can be
followed over iterations. Token ids are not written (see ``data.record_trajectories``). Validations also go to Weights &
Biases and TensorBoard as a table, under verl's name ``val/generations``.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from lit_rl.callbacks.iteration_metrics import scored_version
from lit_rl.data import PromptSource
from lit_rl.types import Trajectory

log = logging.getLogger(__name__)

TRAJECTORIES = "trajectories"
_TABLE = "val/generations"
_TABLE_COLUMNS = ("step", "data_source", "row_id", "input", "output", "gts", "score", "error")


class TrajectoryLog(Callback):
    """Write a sample of each iteration's and each validation's trajectories.

    Args:
        max_per_iteration: Trajectories per file at most, at least 0; -1 writes all. ``predict`` always writes all.
        max_in_table: Of those of a validation, how many go into the loggers' table; 0 logs none.
    """

    def __init__(self, max_per_iteration: int = 32, max_in_table: int = 16) -> None:
        if max_per_iteration < -1:
            raise ValueError(f"TrajectoryLog.max_per_iteration={max_per_iteration} must be -1 (all) or at least 0.")
        if max_in_table < 0:
            raise ValueError(f"TrajectoryLog.max_in_table={max_in_table} must be at least 0.")
        self.max_per_iteration = max_per_iteration
        self.max_in_table = max_in_table
        self._ground_truths: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the rows' ground truths, which trajectories do not carry."""
        if trainer.is_global_zero and (self.max_per_iteration != 0 or self.max_in_table > 0):
            self._ground_truths = ground_truths(_data(trainer).sources.values())

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the iteration's file."""
        iteration = trainer.current_epoch
        self._write(
            trainer, _data(trainer).last_trajectories, f"iteration_{iteration:05d}", self.max_per_iteration, iteration
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the validation's file; a sanity check leaves none."""
        if trainer.sanity_checking:
            return
        version = scored_version(pl_module)
        name = f"validation_{version:05d}" if trainer.state.fn == "fit" else "validation"
        trajectories = _data(trainer).last_validation_trajectories
        self._write(trainer, trajectories, name, self.max_per_iteration, version)
        if trainer.is_global_zero:
            rows = self._rows(trainer, trajectories, self.max_in_table, version)
            for logger in trainer.loggers:
                log_table(logger, rows, version)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the test's file."""
        self._write(
            trainer, _data(trainer).last_validation_trajectories, "test", self.max_per_iteration, trainer.current_epoch
        )

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write all predictions."""
        self._write(trainer, _data(trainer).last_validation_trajectories, "predict", -1, trainer.current_epoch)

    def _write(self, trainer: Trainer, trajectories: list[Trajectory], name: str, at_most: int, step: int) -> None:
        rows = self._rows(trainer, trajectories, at_most, step) if trainer.is_global_zero else []
        if not rows:
            return
        folder = Path(trainer.default_root_dir) / TRAJECTORIES
        folder.mkdir(exist_ok=True)
        try:
            with (folder / f"{name}.jsonl").open("w") as file:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        except OSError as error:
            # A log that cannot be written is no reason to lose a run; a full disk stops it at its next checkpoint.
            log.warning("Could not write %s: %s", folder / f"{name}.jsonl", error)

    def _rows(self, trainer: Trainer, trajectories: list[Trajectory], at_most: int, step: int) -> list[dict[str, Any]]:
        chosen = sample_trajectories(trajectories, at_most)
        return [trajectory_row(item, _data(trainer).decode, self._ground_truths, step) for item in chosen]


def _data(trainer: Trainer) -> Any:
    return trainer.datamodule  # type: ignore[attr-defined]


def sample_trajectories(trajectories: Iterable[Trajectory], at_most: int) -> list[Trajectory]:
    """Choose trajectories by a hash of row and position in the group; the same ones every time a row comes up.

    Args:
        trajectories: Of one iteration.
        at_most: How many; -1 takes all.

    Returns:
        The chosen ones, trajectories of one group next to each other.
    """

    def by_group(trajectory: Trajectory) -> tuple[str, int]:
        return trajectory.group_id, trajectory.sample_index

    everything = list(trajectories)
    if at_most >= 0:
        everything.sort(key=lambda item: (zlib.crc32(item.row_id.encode()), *by_group(item)))
        everything = everything[:at_most]
    return sorted(everything, key=by_group)


def log_table(logger: Logger, rows: list[dict[str, Any]], step: int) -> None:
    """Give a logger that shows tables one of sampled trajectories; others are passed over.

    Args:
        logger: Of the trainer.
        rows: From `trajectory_row`.
        step: Weights version.
    """
    if not rows:
        return
    # A column has one type: numbers as they are, ground truths of any kind as text.
    cells = [
        [row[name] if name in ("step", "score") or row[name] is None else str(row[name]) for name in _TABLE_COLUMNS]
        for row in rows
    ]
    if isinstance(logger, WandbLogger):
        logger.log_table(_TABLE, columns=list(_TABLE_COLUMNS), data=cells, step=step)
    elif isinstance(logger, TensorBoardLogger):
        lines = [_TABLE_COLUMNS, ["---"] * len(_TABLE_COLUMNS), *cells]
        logger.experiment.add_text(_TABLE, "\n".join(f"| {' | '.join(map(_markdown, line))} |" for line in lines), step)


def _markdown(value: Any) -> str:
    """Text that stays in its cell."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return text.replace("\n", "<br>")


def ground_truths(sources: Iterable[PromptSource | None]) -> dict[str, Any]:
    """Ground truth by row id.

    Args:
        sources: Of training, validation and test, those there are.
    """
    rows = (source[index] for source in sources if source is not None for index in range(len(source)))
    return {row.row_id: row.ground_truth for row in rows}


def trajectory_row(
    trajectory: Trajectory, decode: Callable[[list[int]], str], truths: Mapping[str, Any], step: int
) -> dict[str, Any]:
    """One trajectory as plain values.

    Args:
        trajectory: Scored or failed.
        decode: Text of token ids.
        truths: Ground truth by row id; ``None`` goes into ``gts`` where a row is missing.
        step: Iteration, or weights version of a validation.
    """
    oldest, newest = trajectory.version_range
    return {
        "input": decode(trajectory.prompt_ids),
        # What the policy wrote, or with tool or user turns in between the whole conversation after the prompt.
        "output": trajectory.text if all(trajectory.loss_mask) else decode(trajectory.response_ids),
        "gts": truths.get(trajectory.row_id),
        "score": trajectory.reward,
        "step": step,
        "reward_parts": trajectory.reward_parts,
        "reward_notes": trajectory.reward_notes,
        "data_source": trajectory.data_source,
        "row_id": trajectory.row_id,
        "group_id": trajectory.group_id,
        "sample_index": trajectory.sample_index,
        "stop_reason": trajectory.stop_reason,
        "num_turns": trajectory.num_turns,
        "prompt_tokens": len(trajectory.prompt_ids),
        "response_tokens": len(trajectory.response_ids),
        "policy_version_min": oldest,
        "policy_version_max": newest,
        "seed": trajectory.seed,
        "messages": trajectory.messages,
        "error": trajectory.error,
    }
