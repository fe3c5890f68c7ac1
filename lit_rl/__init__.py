"""lit_rl: reinforcement-learning post-training of language models on PyTorch Lightning.

Importing this package is cheap and starts nothing: the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.datamodule import RolloutDataModule
    from lit_rl.modules import GRPO, PolicyGradientModule

__version__ = "0.1.0"

_LAZY = {
    "GRPO": "lit_rl.modules",
    "PolicyGradientModule": "lit_rl.modules",
    "RolloutDataModule": "lit_rl.datamodule",
}

__all__ = ["GRPO", "PolicyGradientModule", "RolloutDataModule", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lit_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
