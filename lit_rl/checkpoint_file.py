"""Refuse a checkpoint that cannot be loaded before Ray or an engine starts.

Position in the flow: `lit_rl.run_folder` says which file an option means; this looks into it; Lightning loads it once
the replicas are up, minutes later. The file is mapped, not read: the weights stay on the disk.
"""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lit_rl.callbacks.checkpoint_files import PARTIAL
from lit_rl.config_keys import ConfigError
from lit_rl.run_folder import iteration_checkpoints

_WEIGHTS = ("state_dict", "lit_rl_policy_version")
_PROGRESS = ("optimizer_states", "loops", "epoch")


def check_checkpoint(path: str, *, resumes: bool) -> None:
    """Raise unless a file is a whole checkpoint of lit_rl; folders and addresses are left to Lightning.

    Args:
        path: From `lit_rl.run_folder.resolve_checkpoint`.
        resumes: Whether training goes on from it, which takes more than the weights.

    Raises:
        ConfigError: Naming the file, what is wrong with it, and the newest complete checkpoint beside it.
    """
    file = Path(path)
    if file.is_file() and (problem := checkpoint_problem(file, resumes=resumes)) is not None:
        raise ConfigError(f"ckpt_path={path}: {problem} {_what_instead(file, resumes=resumes)}")


def checkpoint_problem(file: Path, *, resumes: bool) -> str | None:
    """What keeps a file from being loaded, as a sentence; ``None`` where nothing does.

    Args:
        file: The file.
        resumes: See `check_checkpoint`.
    """
    if file.name.endswith(PARTIAL):
        return f"a name that ends in {PARTIAL} is that of a checkpoint whose writing was cut short."
    # The list of contents is at the end of the file: without it the end is missing.
    if not zipfile.is_zipfile(file):
        return f"the file ({file.stat().st_size} bytes) is cut short, or no checkpoint at all."
    try:
        content: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        KeyError,
        ImportError,
        AttributeError,
        pickle.PickleError,
    ) as error:
        return f"the file cannot be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})."
    keys = set(content) if isinstance(content, dict) else set()
    if missing := [key for key in _WEIGHTS if key not in keys]:
        return f"it is no checkpoint that lit-rl has written (without {', '.join(missing)})."
    if resumes and (missing := [key for key in _PROGRESS if key not in keys]):
        return f"it holds weights only (without {', '.join(missing)}): training cannot go on from it."
    return None


def _what_instead(file: Path, *, resumes: bool) -> str:
    others = [other for other in iteration_checkpoints(file.parent) if other.resolve() != file.resolve()]
    for other in reversed(others):
        if checkpoint_problem(other, resumes=resumes) is None:
            return f"The newest complete checkpoint of that run: --ckpt_path {other}"
    return "No other complete checkpoint lies beside it. Weights of another program are given as model_name."
