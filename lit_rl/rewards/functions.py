"""Find a user's reward function: by dotted path, in a file, or as the object itself.

A file is executed once per process, from whatever working folder. Nothing here calls a reward function.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_rl.data.user_files import load_user_file

DEFAULT_NAME = "compute_score"
CALL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What every reward function may take, by keyword."""
MODELS_ARGUMENT = "models"
"""What an ``async`` function may take beside them: the run's reward models by name."""


@dataclass(kw_only=True)
class RewardFunction:
    """A loaded reward function with its own keyword arguments.

    Attributes:
        name: How error messages call it.
        call: The function.
        kwargs: Its configured keyword arguments; they win over those of the call.
        arguments: Which of `CALL_ARGUMENTS` it takes.
        is_async: Whether it is an ``async def``.
        takes_models: Whether it has a parameter ``models``.
    """

    name: str
    call: Callable[..., Any]
    kwargs: dict[str, Any]
    arguments: tuple[str, ...]
    is_async: bool
    takes_models: bool = False


def load_reward_function(function: str | Callable[..., Any], kwargs: dict[str, Any]) -> RewardFunction:
    """Load a function and check that it can be called.

    Args:
        function: See `RewardSettings.function`.
        kwargs: Its configured keyword arguments.

    Raises:
        ValueError: If file, module or name do not exist, or if the function's parameters do not fit.
    """
    if callable(function):
        call, name = function, getattr(function, "__qualname__", type(function).__name__)
    else:
        call, name = _resolve(function), function
    # An object with an async __call__ counts too.
    is_async = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
    return RewardFunction(
        name=name,
        call=call,
        kwargs=kwargs,
        arguments=_accepted_arguments(call, name, kwargs),
        is_async=is_async,
        takes_models=is_async and MODELS_ARGUMENT not in kwargs and MODELS_ARGUMENT in _parameters(call),
    )


def absolute_spec(function: str | Callable[..., Any]) -> str | Callable[..., Any]:
    """The same function, its file (if it is one) as an absolute path: workers have another working folder."""
    if callable(function) or not _is_file(function):
        return function
    path, name = _split_file(function)
    return f"{path}:{name}"


def importable_spec(function: str | Callable[..., Any]) -> str:
    """Text by which another process can find ``function``.

    Raises:
        ValueError: If it is a lambda, a closure, a method or part of ``__main__``.
    """
    if isinstance(function, str):
        return str(absolute_spec(function))
    module, name = getattr(function, "__module__", "__main__"), getattr(function, "__qualname__", "")
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"data.rewards.isolation='process' needs a function another process can import, not {function!r}: "
            "put it into a file or module and name it ('rewards.py:my_reward'), or set isolation to 'thread'."
        )
    return f"{module}:{name}"


def _is_file(spec: str) -> bool:
    return spec.endswith(".py") or ".py:" in spec


def _split_file(spec: str) -> tuple[Path, str]:
    if spec.endswith(".py"):
        return Path(spec).expanduser().resolve(), DEFAULT_NAME
    path, name = spec.rsplit(":", 1)
    return Path(path).expanduser().resolve(), name


def _resolve(spec: str) -> Callable[..., Any]:
    if _is_file(spec):
        path, name = _split_file(spec)
        try:
            module, place = load_user_file(path), f"file {path}"
        except FileNotFoundError as error:
            raise ValueError(f"data.rewards.function: {error}") from error
    else:
        module_name, _, name = spec.rpartition(":" if ":" in spec else ".")
        if not module_name:
            raise ValueError(f"data.rewards.function={spec!r}: write 'module:name' or 'path/to/file.py:name'.")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(f"data.rewards.function={spec!r}: cannot import {module_name!r} ({error}).") from error
        place = f"module {module_name}"
    found = getattr(module, name, None)
    if not callable(found):
        functions = sorted(key for key, value in vars(module).items() if inspect.isfunction(value) and key[0] != "_")
        raise ValueError(
            f"data.rewards.function={spec!r}: {place} has no function {name!r}. "
            f"It has: {', '.join(functions) or 'no functions'}."
        )
    return found


def _parameters(call: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(call).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return []


def _accepted_arguments(call: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return CALL_ARGUMENTS
    further = (MODELS_ARGUMENT,) if inspect.iscoroutinefunction(call) else ()
    takes_anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [] if takes_anything else sorted(set(kwargs) - set(by_name))
    missing = [
        p.name
        for p in by_name.values()
        if p.default is p.empty and p.name not in kwargs and p.name not in (*CALL_ARGUMENTS, *further)
    ]
    missing += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if unknown or missing:
        raise ValueError(
            f"Reward function {name} is called with the keywords {', '.join(CALL_ARGUMENTS)} and data.rewards.kwargs. "
            + (f"It needs {', '.join(missing)} beside them. " if missing else "")
            + (f"It does not take {', '.join(unknown)} of data.rewards.kwargs." if unknown else "")
        )
    return CALL_ARGUMENTS if takes_anything else tuple(argument for argument in CALL_ARGUMENTS if argument in by_name)
