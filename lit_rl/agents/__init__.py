"""Agent loops: what turns a prompt into a trajectory, and the workers and manager that run many at once."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_rl.agents.agent_loop import AgentLoop, InfrastructureError
    from lit_rl.agents.manager import AgentLoopManager, RolloutFailed, split_evenly
    from lit_rl.agents.settings import AgentLoopSpec, AgentSettings, TrajectoryRequest
    from lit_rl.agents.single_turn import SingleTurnAgentLoop
    from lit_rl.agents.tool_agent import ToolAgentLoop
    from lit_rl.agents.worker import AgentLoopWorker

# Loaded on first use: the tool loop brings the parsers along, which a single-turn run never needs.
_LAZY = {
    "AgentLoop": "lit_rl.agents.agent_loop",
    "AgentLoopManager": "lit_rl.agents.manager",
    "AgentLoopSpec": "lit_rl.agents.settings",
    "AgentLoopWorker": "lit_rl.agents.worker",
    "AgentSettings": "lit_rl.agents.settings",
    "InfrastructureError": "lit_rl.agents.agent_loop",
    "RolloutFailed": "lit_rl.agents.manager",
    "SingleTurnAgentLoop": "lit_rl.agents.single_turn",
    "ToolAgentLoop": "lit_rl.agents.tool_agent",
    "TrajectoryRequest": "lit_rl.agents.settings",
    "split_evenly": "lit_rl.agents.manager",
}

__all__ = [
    "AgentLoop",
    "AgentLoopManager",
    "AgentLoopSpec",
    "AgentLoopWorker",
    "AgentSettings",
    "InfrastructureError",
    "RolloutFailed",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "TrajectoryRequest",
    "split_evenly",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lit_rl.agents' has no attribute {name!r}")
