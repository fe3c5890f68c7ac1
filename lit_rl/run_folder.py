"""Where a run keeps its files, and which checkpoint a resume means.

Every run owns one folder, ``<runs_dir>/<run_name>/<YYYY-mm-dd_HH-MM-SS>[-n]/``, with ``config.yaml``, ``metrics.csv``,
``checkpoints/``, ``trajectories/`` and ``reward.png``. `lit_rl.cli` makes it before the Trainer and passes it on as
``default_root_dir``; callbacks write below it. Nothing here reads or writes the files themselves.
"""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

CHECKPOINTS = "checkpoints"
"""Sub-folder of a run folder that holds its checkpoints."""
LAST_CHECKPOINT = "last.ckpt"
"""Link to the newest complete checkpoint."""
RUN_FOLDER_VARIABLE = "LIT_RL_RUN_FOLDER"
"""Tells ranks that rank 0 launched which folder it made."""

_ITERATION_CHECKPOINT = re.compile(r"^iteration_(\d+)\.ckpt$")
# What sharded checkpoints hold: Lightning's FSDP2 files, torch's distributed metadata, DeepSpeed's tag file.
_SHARDED_FILES = ("meta.pt", ".metadata", "latest")


def create_run_folder(runs_dir: str | Path, run_name: str, now: datetime | None = None) -> Path:
    """Create and return a folder that no other run has, also when two start in the same second.

    Args:
        runs_dir: Parent of all runs; created when missing.
        run_name: Name of the run; its folder collects the runs of that name.
        now: Time to name the folder after; ``None`` takes the current local time.

    Raises:
        OSError: If it cannot be made; names ``runs_dir``.
    """
    parent = Path(runs_dir) / run_name
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return _new_folder(parent, now or datetime.now())
    except OSError as error:
        raise OSError(
            f"runs_dir={runs_dir}: cannot make a folder in {parent} ({error.strerror}). Set runs_dir to a folder that "
            "can be written."
        ) from error


def _new_folder(parent: Path, now: datetime) -> Path:
    stamp = now.strftime("%Y-%m-%d_%H-%M-%S")
    attempt = 1
    while True:
        folder = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
        try:
            # mkdir either makes the folder or fails: the file system decides between two runs, not a check before it.
            folder.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return folder


def iteration_checkpoints(folder: str | Path) -> list[Path]:
    """Complete iteration checkpoints in a checkpoint folder, oldest first.

    A checkpoint gets its name only once it is on disk (see `lit_rl.callbacks.checkpoint`), so a name without the
    ``.partial`` ending is the mark of a complete one.
    """
    found = [
        (int(match[1]), path) for path in Path(folder).glob("*") if (match := _ITERATION_CHECKPOINT.match(path.name))
    ]
    return [path for _, path in sorted(found)]


def last_checkpoint(folder: str | Path) -> Path | None:
    """Newest complete checkpoint of a run folder (or of its checkpoint folder), ``None`` when there is none."""
    folder = Path(folder)
    for candidate in (folder / CHECKPOINTS, folder):
        link = candidate / LAST_CHECKPOINT
        if link.exists():
            return link
        if complete := iteration_checkpoints(candidate):
            return complete[-1]
    return None


def resolve_checkpoint(value: str | None, runs_dir: str | Path, run_name: str, *, required: bool = False) -> str | None:
    """Return the path Lightning shall load for a ``ckpt_path`` option.

    Args:
        value: A file, a sharded checkpoint folder, a run folder, a checkpoint folder, or ``"last"``: the newest
            checkpoint of all runs of this name. ``None`` and Lightning's ``"best"`` and ``"hpc"`` pass through.
        runs_dir: Parent of all runs.
        run_name: Name of the run.
        required: ``"last"`` must find one.

    Returns:
        The path, or ``None`` for ``"last"`` when no run of this name has a checkpoint yet (so that a job which is
        restarted by a scheduler can always pass ``last``).

    Raises:
        FileNotFoundError: If the path does not exist, or the folder holds no checkpoint.
    """
    if value is None or value in ("best", "hpc") or "://" in value or value.startswith("registry:"):
        return value
    if value == "last":
        runs = Path(runs_dir) / run_name
        found = [last for run in runs.glob("*") if run.is_dir() and (last := last_checkpoint(run)) is not None]
        if required and not found:
            raise FileNotFoundError(f"ckpt_path=last: no run below {runs} has a checkpoint yet.")
        return str(max(found, key=lambda path: path.stat().st_mtime)) if found else None
    path = Path(value)
    if not path.exists():
        raise FileNotFoundError(
            f"ckpt_path={value}: no such file or folder. Give a checkpoint, a run folder, or 'last' for the newest "
            f"checkpoint of {Path(runs_dir) / run_name}."
        )
    if path.is_file() or any((path / name).exists() for name in _SHARDED_FILES):
        return value
    last = last_checkpoint(path)
    if last is None:
        raise FileNotFoundError(
            f"ckpt_path={value}: the folder holds no complete checkpoint (looked for {LAST_CHECKPOINT} and "
            f"iteration_*.ckpt in it and in its {CHECKPOINTS}/)."
        )
    return str(last)


def inherited_run_folder(runs_dir: str | Path, run_name: str) -> Path:
    """Folder that rank 0 made, as the other ranks see it; they only read this path, rank 0 alone writes."""
    return Path(os.environ.get(RUN_FOLDER_VARIABLE, str(Path(runs_dir) / run_name)))
