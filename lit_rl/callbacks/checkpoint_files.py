"""Checkpoints on disk: written aside, flushed, renamed. When one is written is `IterationCheckpoint`'s business."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lit_rl.run_folder import LAST_CHECKPOINT

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


def link_last(path: Path) -> None:
    """Point ``last.ckpt`` to a complete checkpoint, in one step."""
    aside = path.with_name(LAST_CHECKPOINT + PARTIAL)
    aside.unlink(missing_ok=True)
    # A file system without links still has the newest iteration by its name.
    with contextlib.suppress(OSError):
        aside.symlink_to(path.name)
        os.replace(aside, path.with_name(LAST_CHECKPOINT))


def replace_checkpoint(aside: Path, target: Path) -> None:
    """Give a complete checkpoint its name; one of that name is there until then."""
    outdated = target.with_name(f"{target.name}.outdated{PARTIAL}")
    if target.is_dir():  # a folder is not renamed onto another: for a moment neither is there
        os.replace(target, outdated)
    os.replace(aside, target)
    remove(outdated)


def flush(path: Path) -> None:
    """Have the disk hold a file, or a folder and the files in it, before anything relies on it."""
    for entry in [*(path.rglob("*") if path.is_dir() and path.name.endswith(PARTIAL) else ()), path]:
        descriptor = os.open(entry, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint, file or folder, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
