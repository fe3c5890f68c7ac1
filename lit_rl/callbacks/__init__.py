"""What acts between the phases of an iteration: weight sync, checkpoints, progress, trajectory files, reward plot."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.callbacks.checkpoint import IterationCheckpoint
    from lit_rl.callbacks.collapse_warning import CollapseWarning
    from lit_rl.callbacks.progress import RLProgress
    from lit_rl.callbacks.reward_plot import RewardPlot
    from lit_rl.callbacks.run_config import LogRunConfig
    from lit_rl.callbacks.trajectory_log import TrajectoryLog
    from lit_rl.callbacks.validate_first import ValidateFirst
    from lit_rl.callbacks.weight_sync import WeightSync

_MODULE_OF = {
    "CollapseWarning": "collapse_warning",
    "IterationCheckpoint": "checkpoint",
    "LogRunConfig": "run_config",
    "RLProgress": "progress",
    "RewardPlot": "reward_plot",
    "TrajectoryLog": "trajectory_log",
    "ValidateFirst": "validate_first",
    "WeightSync": "weight_sync",
}

__all__ = [
    "CollapseWarning",
    "IterationCheckpoint",
    "LogRunConfig",
    "RLProgress",
    "RewardPlot",
    "TrajectoryLog",
    "ValidateFirst",
    "WeightSync",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
