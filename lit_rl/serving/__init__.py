"""Sampling from the policy: replicas around engines, the balancer and client in front, and their manager."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lit_rl.serving.settings import ServingSettings

if TYPE_CHECKING:
    from lit_rl.serving.client import LLMServerClient
    from lit_rl.serving.load_balancer import LoadBalancer
    from lit_rl.serving.manager import LLMServerManager
    from lit_rl.serving.replica import Replica

_LAZY = {
    "LLMServerClient": "lit_rl.serving.client",
    "LLMServerManager": "lit_rl.serving.manager",
    "LoadBalancer": "lit_rl.serving.load_balancer",
    "Replica": "lit_rl.serving.replica",
}

__all__ = ["LLMServerClient", "LLMServerManager", "LoadBalancer", "Replica", "ServingSettings"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lit_rl.serving' has no attribute {name!r}")
