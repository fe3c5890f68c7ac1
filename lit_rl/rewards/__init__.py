"""Rewards: functions that score finished trajectories, and the workers and manager that run them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.rewards.client import RewardClient
    from lit_rl.rewards.manager import RewardLoopManager
    from lit_rl.rewards.result import RewardResult, ScoreRequest, merge_reward_parts, normalize_reward_return
    from lit_rl.rewards.score import check_data_sources, compute_score, has_scorer
    from lit_rl.rewards.settings import OverlongShaping, RewardModelSettings, RewardPart, RewardSettings
    from lit_rl.rewards.worker import RewardLoopWorker

# Loaded on first use, so that a scorer or a scoring process starts without the workers.
_LAZY = {
    "OverlongShaping": "lit_rl.rewards.settings",
    "RewardClient": "lit_rl.rewards.client",
    "RewardLoopManager": "lit_rl.rewards.manager",
    "RewardLoopWorker": "lit_rl.rewards.worker",
    "RewardModelSettings": "lit_rl.rewards.settings",
    "RewardPart": "lit_rl.rewards.settings",
    "RewardResult": "lit_rl.rewards.result",
    "RewardSettings": "lit_rl.rewards.settings",
    "ScoreRequest": "lit_rl.rewards.result",
    "check_data_sources": "lit_rl.rewards.score",
    "compute_score": "lit_rl.rewards.score",
    "has_scorer": "lit_rl.rewards.score",
    "merge_reward_parts": "lit_rl.rewards.result",
    "normalize_reward_return": "lit_rl.rewards.result",
}

__all__ = [
    "OverlongShaping",
    "RewardClient",
    "RewardLoopManager",
    "RewardLoopWorker",
    "RewardModelSettings",
    "RewardPart",
    "RewardResult",
    "RewardSettings",
    "ScoreRequest",
    "check_data_sources",
    "compute_score",
    "has_scorer",
    "merge_reward_parts",
    "normalize_reward_return",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lit_rl.rewards' has no attribute {name!r}")
