"""Say in one line why a configured value or class is refused, where jsonargparse says it in thirty.

Position in the flow: `lit_rl.config_keys` asks for every value on its way through the sources; what it lets pass, the
parser judges, and its message is cut down to the option and the reason. jsonargparse decides what is valid in either
case: here are only the words.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import re
import sys
import types
import typing
from argparse import ArgumentError
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_PARSER_KEY = re.compile(r'^(\s*)(?:- )?Parser key "([^"]+)":\s*(.*)$')
_NO_REASON = ("Does not validate", "Subtypes:", "Errors:", "Given value", "Problem with given class_path")
_LEADING_KEYS = re.compile(r"(?:[\w.]+: )+")
_CLASS = re.compile(r"<class '([^']+)'>")
_MOST_REASONS = 3
_MOST_CLASSES = 8
_NULL = ("null", "None")


def value_problem(value: Any, hint: Any) -> str | None:
    """The rule a plain value breaks, such as ``must be a whole number``; ``None`` where it may be valid.

    Args:
        value: From a YAML file, or the text of a command-line option.
        hint: Type hint of the option. One that names a class is left to the parser.
    """
    # One item may be what is added to a list (``--stop+=x``).
    if value is None or not _is_plain(hint) or _is_accepted(value, hint) or _is_accepted([value], hint):
        return None
    choices = [str(choice) for choice in _choices(hint)]
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"must be {_in_words(hint)}." + (f" Did you mean {near[0]!r}?" if near else "")


def class_problem(value: str, target: Any, hint: Any) -> str | None:
    """Why what is named cannot stand for a class; ``None`` where it may.

    Args:
        value: What was written: a dotted path or a name.
        target: What it names; ``None`` where nothing was found.
        hint: Type hint of the option.
    """
    bases = [item for item in plain_types(hint) if isinstance(item, type) and item not in _WORDS and item is not Any]
    if not bases or any(_is_written_as_text(base) for base in bases) or "Callable" in str(hint):
        return None
    if target is None:
        plain = [item for item in _members(hint) if _is_plain(item)]
        is_null = value in _NULL and type(None) in plain
        if is_null or Path(value).is_file() or any(_is_accepted(value, item) for item in plain):
            return None
        record = next((base for base in bases if dataclasses.is_dataclass(base)), None)
        if record is not None:
            keys = [field.name for field in dataclasses.fields(record)]
            return f"must be a mapping with {', '.join(keys[:_MOST_CLASSES])}{', ...' * (len(keys) > _MOST_CLASSES)}"
        return f"names no class.{_near_class(value, bases)}"
    if inspect.isclass(target) and not any(_is_protocol(base) or issubclass(target, base) for base in bases):
        names = dict.fromkeys(base.__name__ for base in bases)
        return f"is no {' or '.join(names)}.{_near_class(target.__name__, bases)}"
    return None


def shortened(message: str) -> str:
    """Return jsonargparse's message without the types it tried and the values they hold: option and reason.

    Args:
        message: What the parser gives to its ``error``.
    """
    keys: list[str] = []
    reasons: list[str] = []
    depth = -1
    for line in message.splitlines():
        if (match := _PARSER_KEY.match(line)) is not None:
            if len(match[1]) <= depth:  # another type of the same union: the first is the one that was meant
                break
            depth, reasons = len(match[1]), [match[3]] if match[3] else []
            keys.append(match[2])
        elif (text := line.strip().removeprefix("- ")) and not text.startswith(_NO_REASON):
            reasons.append(text)
    told = list(dict.fromkeys(reasons))
    # What the other types of a union would have wanted.
    told = [reason for reason in told if not reason.startswith("Expected a ")] or told[:1]
    text = "".join(f"{key}: " for key in keys) + "; ".join(told[:_MOST_REASONS])
    # Parsers of nested parts have been here before: one path for all of them.
    path = _LEADING_KEYS.match(text)
    text = f"{path[0][:-2].replace(': ', '.')}: {text[path.end() :]}" if path else text
    return _CLASS.sub(r"\1", text)


def plain_types(hint: Any) -> list[Any]:
    """The types of a hint such as ``list[A] | B | None``, its containers left out."""
    arguments = typing.get_args(hint)
    return [item for argument in arguments for item in plain_types(argument)] if arguments else [hint]


def _members(hint: Any) -> list[Any]:
    """The alternatives of a union, or the one type."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [item for part in typing.get_args(hint) for item in _members(part)] if is_union else [hint]


def _choices(hint: Any) -> list[Any]:
    return [
        choice
        for item in _members(hint)
        if typing.get_origin(item) is typing.Literal
        for choice in typing.get_args(item)
    ]


def _is_plain(hint: Any) -> bool:
    """Whether numbers, text, truth values, choices and lists of those are all it takes."""
    members = _members(hint)
    if len(members) > 1:
        return all(_is_plain(item) for item in members)
    if typing.get_origin(hint) is typing.Literal:
        return True
    if typing.get_origin(hint) in (list, tuple):
        return all(item is ... or _is_plain(item) for item in typing.get_args(hint))
    return hint in _WORDS


@functools.cache
def _parser_of(hint: Any) -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    return parser


def _is_accepted(value: Any, hint: Any) -> bool:
    """Whether jsonargparse takes the value, read as YAML or as the text of an option."""
    ways = [lambda: _parser_of(hint).parse_object({"value": value})]
    if isinstance(value, str):
        ways.append(lambda: _parser_of(hint).parse_args([f"--value={value}"]))
    for parse in ways:
        try:
            parse()
        except (ArgumentError, TypeError, ValueError):
            continue
        return True
    return False


def _in_words(hint: Any) -> str:
    members = _members(hint)
    choices = dict.fromkeys(map(str, _choices(hint)))
    if len(members) > 1 or choices:
        others = [_in_words(item) for item in members if typing.get_origin(item) is not typing.Literal]
        return " or ".join([*([f"one of {', '.join(choices)}"] if choices else []), *dict.fromkeys(others)])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and ... not in arguments:
        return f"a list of {len(arguments)}: {', '.join(map(_in_words, arguments))}"
    if origin in (list, tuple):
        return f"a list, each item {_in_words(arguments[0])}"
    return _WORDS[hint]


def _is_written_as_text(base: type) -> bool:
    """Whether values of it are written as text, as those of ``timedelta`` or an enumeration are."""
    return base.__module__.partition(".")[0] in sys.stdlib_module_names or issubclass(base, enum.Enum)


def _is_protocol(base: type) -> bool:
    return bool(getattr(base, "_is_protocol", False))


def _near_class(name: str, bases: list[type]) -> str:
    """The class nearest by name among the public and imported ones that fit, or some of them."""
    paths: dict[str, str] = {}
    for base in bases:
        package = importlib.import_module(base.__module__.rpartition(".")[0] or base.__module__)
        public = [getattr(package, key, None) for key in getattr(package, "__all__", ())]
        for found in [*public, *subclasses(base)]:
            if inspect.isclass(found) and found is not base and _fits(found, base):
                paths[found.__name__] = _public_path(found)
    if near := difflib.get_close_matches(name.rpartition(".")[2], paths, n=1):
        return f" Did you mean {paths[near[0]]}?"
    ours = sorted(path for path in paths.values() if path.startswith("lit_rl."))
    end = " and others." if len(ours) > _MOST_CLASSES else "."
    return f" There are {', '.join(ours[:_MOST_CLASSES])}{end}" if ours else ""


def subclasses(base: type) -> list[type]:
    """A class and all its subclasses that are imported."""
    children: list[type] = base.__subclasses__()
    return [base, *(found for child in children for found in subclasses(child))]


def _fits(found: type, base: type) -> bool:
    if not _is_protocol(base):
        return issubclass(found, base)
    wanted = [name for name, value in vars(base).items() if inspect.isfunction(value) and name != "__subclasshook__"]
    return all(hasattr(found, name) for name in wanted)


def _public_path(found: type) -> str:
    """Path of a class in the package of its module, where the package has it."""
    package = found.__module__.rpartition(".")[0]
    is_public = getattr(sys.modules.get(package), found.__name__, None) is found
    return f"{package if is_public else found.__module__}.{found.__name__}"
