"""lit_rl: reinforcement-learning post-training of language models on PyTorch Lightning.

Importing this package is cheap and starts nothing: the names below are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.datamodule import RolloutDataModule
    from lit_rl.modules import (
        CISPO,
        DAPO,
        DPPO,
        GMPO,
        GPG,
        GRPO,
        GSPO,
        OPO,
        PPO,
        RLOO,
        SAPO,
        ClipCov,
        ClippedPolicyModule,
        DecoupledPPO,
        DrGRPO,
        GroupRelativeModule,
        KLCov,
        MaxRL,
        OnPolicyDistillation,
        PassAtK,
        PolicyGradientModule,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        ReMax,
        TokenRewardModule,
    )

__version__ = "0.1.0"

__all__ = [
    "CISPO",
    "ClipCov",
    "ClippedPolicyModule",
    "DAPO",
    "DPPO",
    "DecoupledPPO",
    "DrGRPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "GroupRelativeModule",
    "KLCov",
    "MaxRL",
    "OPO",
    "OnPolicyDistillation",
    "PPO",
    "PassAtK",
    "PolicyGradientModule",
    "RLOO",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RolloutDataModule",
    "SAPO",
    "TokenRewardModule",
    "__version__",
]

_LAZY = dict.fromkeys(set(__all__) - {"__version__"}, "lit_rl.modules") | {"RolloutDataModule": "lit_rl.datamodule"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lit_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
