"""Which agent loop class a name stands for."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rl.agents.agent_loop import AgentLoop
from lit_rl.agents.settings import AgentSettings, is_file_spec
from lit_rl.data.user_files import load_user_file

# verl's names, so that its data files work unchanged.
_BUILT_IN = {
    "single_turn_agent": "lit_rl.agents.single_turn.SingleTurnAgentLoop",
    "tool_agent": "lit_rl.agents.tool_agent.ToolAgentLoop",
    "openai_agent": "lit_rl.agents.openai_agent.OpenAIAgentLoop",
}


@dataclass(kw_only=True)
class LoopClass:
    """A loaded loop class and its configured constructor arguments."""

    cls: type[AgentLoop]
    options: dict[str, Any]


def find_loop_class(name: str | None, settings: AgentSettings) -> LoopClass:
    """Loop class for a row's ``agent_name``; ``None`` takes the default one.

    Raises:
        ValueError: If nothing has that name, or it is not an `AgentLoop`; lists the known names.
    """
    is_default = name is None or name == settings.default_agent_loop
    name = name or settings.default_agent_loop
    if name in settings.agent_loops:
        spec = settings.agent_loops[name]
        return LoopClass(cls=_import_loop(spec.loop_class), options=spec.options)
    path = _BUILT_IN.get(name, name)
    if "." not in path:
        known = sorted([*_BUILT_IN, *settings.agent_loops])
        raise ValueError(
            f"Unknown agent loop {name!r}. Known: {', '.join(known)}; or give the dotted path of an AgentLoop "
            "subclass, or path/to/file.py:ClassName."
        )
    return LoopClass(cls=_import_loop(path), options=settings.default_options if is_default else {})


@functools.cache
def _import_loop(path: str) -> type[AgentLoop]:
    try:
        if is_file_spec(path):
            file, _, class_name = path.rpartition(":")
            found = getattr(load_user_file(Path(file).expanduser().resolve()), class_name)
        else:
            module_name, _, class_name = path.rpartition(".")
            found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ValueError(f"Cannot import agent loop {path!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, AgentLoop)):
        raise ValueError(f"{path} is not a subclass of lit_rl.agents.AgentLoop.")
    return found
