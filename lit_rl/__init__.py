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
        DRO,
        GDPO,
        GMPO,
        GPG,
        GRPO,
        GSPO,
        LUSPO,
        M2PO,
        OPO,
        PFPPO,
        PPO,
        RLOO,
        SAPO,
        SFT,
        VAPO,
        VESPO,
        ClipCov,
        ClippedPolicyModule,
        DecoupledPPO,
        DrGRPO,
        GroupRelativeModule,
        KLCov,
        LitePPO,
        MaxRL,
        OnPolicyDistillation,
        OptimalTokenBaseline,
        PassAtK,
        PolicyGradientModule,
        ReinforcePlusPlus,
        ReinforcePlusPlusBaseline,
        ReMax,
        TokenRewardModule,
        TurnGRPO,
    )
    from lit_rl.sft_datamodule import SFTDataModule, WarmupDataModule

__version__ = "0.1.0"

__all__ = [
    "CISPO",
    "ClipCov",
    "ClippedPolicyModule",
    "DAPO",
    "DPPO",
    "DRO",
    "DecoupledPPO",
    "DrGRPO",
    "GDPO",
    "GMPO",
    "GPG",
    "GRPO",
    "GSPO",
    "GroupRelativeModule",
    "KLCov",
    "LUSPO",
    "LitePPO",
    "M2PO",
    "MaxRL",
    "OPO",
    "OnPolicyDistillation",
    "OptimalTokenBaseline",
    "PFPPO",
    "PPO",
    "PassAtK",
    "PolicyGradientModule",
    "RLOO",
    "ReMax",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "RolloutDataModule",
    "SAPO",
    "SFT",
    "SFTDataModule",
    "TokenRewardModule",
    "TurnGRPO",
    "VAPO",
    "VESPO",
    "WarmupDataModule",
    "__version__",
]

_LAZY = dict.fromkeys(set(__all__) - {"__version__"}, "lit_rl.modules") | {
    "RolloutDataModule": "lit_rl.datamodule",
    "SFTDataModule": "lit_rl.sft_datamodule",
    "WarmupDataModule": "lit_rl.sft_datamodule",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lit_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
