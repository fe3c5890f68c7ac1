"""The last line of a run: where its files are, or how it goes on after it was cut short. Nothing is printed here."""

from __future__ import annotations

import shlex
from pathlib import Path

from lit_rl.callbacks.trajectory_log import TRAJECTORIES
from lit_rl.run_folder import last_checkpoint

_FILES = {"validate": "validation.jsonl", "test": "test.jsonl", "predict": "predict.jsonl"}


def outcome(subcommand: str, run_folder: Path) -> str | None:
    """Where the results of a sub-command are; ``None`` for ``fit``, which says more itself.

    Args:
        subcommand: The sub-command.
        run_folder: Folder of the run.
    """
    if subcommand not in _FILES:
        return None
    file = run_folder / TRAJECTORIES / _FILES[subcommand]
    if not file.exists():
        return f"Done: {subcommand} wrote no trajectories; what else there is lies in {run_folder}"
    with file.open() as lines:
        count = sum(1 for _ in lines)
    what = "predictions" if subcommand == "predict" else "sampled trajectories"
    return f"Done: {count} {what} are in {file}"


def how_to_resume(run_folder: Path, what: str, *, only_with_checkpoint: bool = False) -> str | None:
    """What an interrupted ``fit`` kept, and the command that goes on from there.

    Args:
        run_folder: Folder of the run.
        what: What ended it.
        only_with_checkpoint: ``None`` where nothing was saved, instead of saying so.
    """
    last = last_checkpoint(run_folder)
    if last is None:
        return None if only_with_checkpoint else f"{what}; no iteration was saved, so there is nothing to resume from."
    command = ["lit-rl", "fit", "--config", str(run_folder / "config.yaml"), "--ckpt_path", str(last)]
    return f"{what}; {last.resolve().name} is kept. Resume with: {shlex.join(command)}"
