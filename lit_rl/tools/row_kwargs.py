"""The ``tools_kwargs`` of a row: checked once, then handed to the methods of class tools.

verl passes ``create_kwargs`` as one argument of that name. Tools are written in both styles, ``create(self,
instance_id, ground_truth=...)`` and ``kwargs["create_kwargs"]``, so both receive their values here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from lit_rl.tools.base_tool import BaseTool, ToolContext
from lit_rl.tools.function_tool import FunctionTool

KWARGS_GROUPS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
_RESERVED = frozenset({"self", "instance_id", "parameters", "agent_data"})


def check_tools_kwargs(
    tools_kwargs: Any, tools: Mapping[str, BaseTool | FunctionTool], known_tools: Collection[str], row_id: str
) -> dict[str, dict[str, Any]]:
    """Return the row's ``tools_kwargs`` without empty entries.

    Raises:
        ValueError: For a wrong shape, an unknown tool or group, or a name that the tool's method does not take.
    """
    place = f"Row {row_id}: tools_kwargs"
    if tools_kwargs is None:
        return {}
    if not isinstance(tools_kwargs, Mapping):
        raise ValueError(f"{place} is a {type(tools_kwargs).__name__}; it must map tool names to keyword groups.")
    checked: dict[str, dict[str, Any]] = {}
    for name, groups in tools_kwargs.items():
        if groups is None:  # parquet fills the structs of a column with None where a row lacks a key
            continue
        if name not in tools and name not in known_tools:
            raise ValueError(f"{place} names the tool '{name}', which is not configured; there are {sorted(tools)}.")
        if not isinstance(groups, Mapping):
            raise ValueError(
                f"{place}['{name}'] is a {type(groups).__name__}; it must hold {', '.join(KWARGS_GROUPS)}."
            )
        for group, values in groups.items():
            if values is None:
                continue
            if group not in KWARGS_GROUPS:
                raise ValueError(f"{place}['{name}'] has the group '{group}'; it must be one of {list(KWARGS_GROUPS)}.")
            if not isinstance(values, Mapping):
                raise ValueError(f"{place}['{name}']['{group}'] is a {type(values).__name__}; it must be a mapping.")
            _check_names(f"{place}['{name}']['{group}']", tools.get(name), group, values)
            checked.setdefault(name, {})[group] = dict(values)
    return checked


def method_kwargs(
    method: Callable[..., Any], group: str, values: dict[str, Any], context: ToolContext | None = None
) -> dict[str, Any]:
    """Return the keyword arguments of one life-cycle method of a class tool."""
    names, takes_any = _accepted(getattr(method, "__func__", method))
    kwargs = {key: value for key, value in values.items() if takes_any or key in names}
    if group in names or (takes_any and values):
        kwargs[group] = values
    if context is not None and group == "execute_kwargs" and (takes_any or "agent_data" in names):
        kwargs["agent_data"] = context
    return kwargs


def _check_names(place: str, tool: BaseTool | FunctionTool | None, group: str, values: Mapping[str, Any]) -> None:
    if not isinstance(tool, BaseTool):
        return
    method = getattr(tool, group.removesuffix("_kwargs"))
    names, takes_any = _accepted(getattr(method, "__func__", method))
    refused = [key for key in values if key in _RESERVED or not (takes_any or group in names or key in names)]
    if refused:
        raise ValueError(
            f"{place} has {refused}, which {type(tool).__name__}.{method.__name__}() does not take; "
            f"it takes {sorted(names - _RESERVED)}."
        )


@functools.lru_cache(maxsize=4096)
def _accepted(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return frozenset(parameter.name for parameter in parameters), takes_any
