"""Which agent loop class a name stands for."""

from __future__ import annotations

import functools
import importlib
import inspect
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


_GIVEN_BY_WORKER = {
    "client",
    "chat_template",
    "tokenizer",
    "max_response_tokens",
    "end_token_ids",
    "appended_end_token_id",
    "tools",
    "interactions",
    "conversation_id",
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


def check_loops(settings: AgentSettings) -> None:
    """Load every configured loop class and compare its options with its constructor's parameters.

    Raises:
        ValueError: If a class is not found, or its options do not fit; names class and option.
    """
    for name in (None, *settings.agent_loops):
        loop_class = find_loop_class(name, settings)
        where = "data.agents.default_options" if name is None else f"data.agents.agent_loops.{name}.options"
        parameters, takes_any = _parameters(loop_class.cls)
        own = {key: parameter for key, parameter in parameters.items() if key not in _GIVEN_BY_WORKER}
        for option in loop_class.options:
            if option in _GIVEN_BY_WORKER:
                raise ValueError(f"{where}: {option} is given by the worker; leave it out.")
            if option not in own and not takes_any:
                taken = ", ".join(sorted(own)) or "no options"
                raise ValueError(f"{where}: {loop_class.cls.__name__} does not take {option!r}. It takes {taken}.")
        for option, parameter in own.items():
            if parameter.default is parameter.empty and option not in loop_class.options:
                raise ValueError(f"{where}: {loop_class.cls.__name__} needs {option!r}.")


def _parameters(cls: type[AgentLoop]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Keyword parameters of a loop's constructor and of those it passes ``**kwargs`` on to; whether it takes any."""
    found: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                found.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return found, False
    return found, True


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
