"""The algorithms: one LightningModule each, over the base that runs the update."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.modules.grpo import GRPO
    from lit_rl.modules.policy_gradient import PolicyGradientModule

_LAZY = {"GRPO": "lit_rl.modules.grpo", "PolicyGradientModule": "lit_rl.modules.policy_gradient"}

__all__ = ["GRPO", "PolicyGradientModule"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lit_rl.modules' has no attribute {name!r}")
