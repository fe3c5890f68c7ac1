"""Find mistyped keys in YAML files and on the command line before anything is built.

Sits in front of jsonargparse's own parsing: the same sources are walked in the same order, every key is compared with
what the parser and the classes named by ``class_path`` accept, and an unknown one stops with its full name and the
nearest valid one. jsonargparse alone lets empty unknown sections pass and ignores a value given for a linked key.
Numbers, text and choices are judged on the way (`lit_rl.option_values`); the parser judges the rest afterwards.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import logging
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lit_rl.option_values import class_problem, plain_types, subclasses, value_problem

log = logging.getLogger(__name__)

_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the option, its value, the rule and the fix."""


@functools.cache
def accepted_keys(target: Any) -> dict[str, Any]:
    """Arguments of a class or function as dotted names, nested dataclasses included, each with its type hint.

    Args:
        target: Class or function that a ``class_path`` names.
    """
    parser = ArgumentParser(exit_on_error=False)
    if isinstance(target, type):
        parser.add_class_arguments(target, fail_untyped=False, sub_configs=True)
    else:
        parser.add_function_arguments(target, fail_untyped=False, sub_configs=True)
    return parser_keys(parser)


def parser_keys(parser: ArgumentParser) -> dict[str, Any]:
    """Dotted option names of a parser, each with its type hint (``None`` for groups and flags)."""
    actions = [action for action in parser._actions if action.dest != "help" and not action.dest.endswith(".help")]
    return {action.dest: getattr(action, "_typehint", None) for action in actions}


def import_class(class_path: str, where: str) -> Any:
    """Import what a dotted ``class_path`` names.

    Args:
        class_path: For example ``lit_rl.modules.GRPO``.
        where: Option or file and key that holds it, for the message.

    Raises:
        ConfigError: With the path, the import error and near names of the module.
    """
    module_name, _, name = class_path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{where}: cannot import class_path {class_path!r}: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        near = difflib.get_close_matches(name, {*dir(module), *getattr(module, "__all__", ())}, n=1)
        hint = f" Did you mean {module_name}.{near[0]}?" if near else ""
        raise ConfigError(f"{where}: cannot import class_path {class_path!r}: {error}.{hint}") from error


class KeyChecker:
    """Walks configuration sources in the order the parser applies them.

    Args:
        known: Options of the parser, from `parser_keys`.
        links: Linked option to the option that sets it, such as ``{"model.init_args.model_name": "model_name"}``.
    """

    def __init__(self, known: Mapping[str, Any], links: Mapping[str, str]) -> None:
        self._known = known
        self._links = links
        self._class_of: dict[str, Any] = {}
        self._init_args_of: dict[str, set[str]] = {}

    def check_arguments(self, arguments: Sequence[str]) -> None:
        """Check command-line arguments and the YAML files they name.

        Args:
            arguments: What follows the sub-command.

        Raises:
            ConfigError: At the first key that is unknown or linked.
        """
        position = 0
        while position < len(arguments):
            argument = arguments[position]
            position += 1
            if not argument.startswith("-"):
                continue
            option, has_value, value = argument.partition("=")
            if not has_value and position < len(arguments) and not _is_option(arguments[position]):
                value = arguments[position]
                position += 1
            if option in ("--config", "-c"):
                self.check_file(value)
            elif option.startswith("--") and not option.endswith((".help", "--help")) and option != "--print_config":
                self._check_option(option, value)

    def check_file(self, path: str) -> None:
        """Check one YAML file; a missing or unreadable one is left to the parser, which reports it.

        Args:
            path: The file.
        """
        try:
            content = yaml.safe_load(Path(path).read_text())
        except (OSError, yaml.YAMLError):
            return
        if isinstance(content, dict):
            self.check_mapping(content, path)

    def check_mapping(self, content: Mapping[str, Any], source: str) -> None:
        """Check a parsed configuration.

        Args:
            content: Nested mapping, as YAML has it.
            source: File or option it came from, for messages.
        """
        self._walk(content, self._known, "", "", source)

    def _check_option(self, option: str, value: str) -> None:
        key = option.removeprefix("--").removesuffix("+")
        if key.startswith("no_") and key not in self._known and key.removeprefix("no_") in self._known:
            return
        content: Any = value
        if value[:1] in ("{", "["):
            try:
                content = yaml.safe_load(value)
            except yaml.YAMLError:
                return
        for part in reversed(key.split(".")):
            content = {part: content}
        self.check_mapping(content, option)

    def _walk(self, section: Mapping[str, Any], known: Mapping[str, Any], prefix: str, path: str, source: str) -> None:
        """Check the keys of one section.

        Args:
            section: Its keys and values.
            known: Keys that its owner accepts, dotted.
            prefix: Of ``section`` within ``known``; ends in a dot unless empty.
            path: Of the owner in the whole configuration; ends in a dot unless empty.
            source: File or option.
        """
        for key, value in section.items():
            name = f"{prefix}{key}"
            is_group = any(other.startswith(f"{name}.") for other in known)
            if path + name in self._links and value is not None:
                raise ConfigError(
                    f"{source}: {path}{name} is set from the top-level {self._links[path + name]}; "
                    f"remove it and set {self._links[path + name]} instead."
                )
            if name not in known and not is_group:
                raise ConfigError(f"{source}: unknown key '{path}{name}'.{self._suggest(name, known, path)}")
            if is_group and isinstance(value, Mapping) and "class_path" not in value:
                self._walk(value, known, f"{name}.", path, source)
                continue
            if (problem := value_problem(value, known.get(name))) is not None:
                raise ConfigError(f"{source}: {path}{name}={value!r} {problem}")
            self._check_value(value, known.get(name), path + name, source)

    def _check_value(self, value: Any, hint: Any, path: str, source: str) -> None:
        if isinstance(value, list):
            for element in value:
                self._check_value(element, hint, f"{path}[]", source)
        elif isinstance(value, str):
            # Where plain text is accepted as well ("ddp", a path) it need not name a class.
            if str not in plain_types(hint):
                self._note_class_name(value, hint, path, source)
        elif isinstance(value, Mapping):
            if isinstance(value.get("class_path"), str):
                self._note_class_name(value["class_path"], hint, path, source)
            target = self._class_of.get(path) if _CLASS_KEYS[0] in value or not path.endswith("[]") else None
            if target is not None:
                self._check_class_section(value, target, path, source)
            elif (element := _mapped_hint(hint)) is not None:
                # Its keys are names the user gives.
                for key, item in value.items():
                    self._check_value(item, element, f"{path}.{key}", source)
            elif (record := _only_dataclass(hint)) is not None:
                self._walk(value, accepted_keys(record), "", f"{path}.", source)

    def _check_class_section(self, value: Mapping[str, Any], target: Any, path: str, source: str) -> None:
        """Check the keys of a ``class_path``/``init_args`` section, or of the short form without ``init_args``."""
        init_args = {key: item for key, item in value.items() if key not in _CLASS_KEYS}
        init_args.update(value.get("init_args") or {})
        self._init_args_of.setdefault(path, set()).update(init_args)
        self._walk(init_args, accepted_keys(target), "", f"{path}.init_args.", source)

    def _note_class_name(self, class_path: str, hint: Any, path: str, source: str) -> None:
        """Remember the class in effect at ``path``; warn when settings of the one before it are dropped."""
        bases = [
            # Any is a class since Python 3.11, and what may be anything need not name one.
            item
            for item in plain_types(hint)
            if isinstance(item, type) and item is not Any and item.__module__ != "builtins"
        ]
        if not bases or not class_path:
            return
        if "." in class_path:
            target = import_class(class_path, f"{source}: {path}")
        else:
            target = next((item for base in bases for item in subclasses(base) if item.__name__ == class_path), None)
        if (problem := class_problem(class_path, target, hint)) is not None:
            raise ConfigError(f"{source}: {path}={class_path!r} {problem}")
        before = self._class_of.get(path)
        self._class_of.pop(path, None)
        if target is None:
            return
        self._class_of[path] = target
        if before is None or before is target or path.endswith("[]"):
            return
        accepted = {key.partition(".")[0] for key in accepted_keys(target)}
        dropped = sorted(self._init_args_of.get(path, set()) - accepted)
        self._init_args_of[path] = self._init_args_of.get(path, set()) & accepted
        if dropped:
            log.warning(
                "%s: %s changes from %s to %s, which does not have %s: dropped.",
                source,
                path,
                before.__name__,
                target.__name__,
                ", ".join(dropped),
            )

    def _suggest(self, name: str, known: Mapping[str, Any], path: str) -> str:
        last = name.rpartition(".")[2]
        elsewhere = [key for key in self._known if key.rpartition(".")[2] == last]
        for owner, target in self._class_of.items():
            elsewhere += [f"{owner}.init_args.{key}" for key in accepted_keys(target) if key.rpartition(".")[2] == last]
        if elsewhere:
            return f" Did you mean '{elsewhere[0]}'?"
        if near := difflib.get_close_matches(name, _with_groups(known), n=1, cutoff=0.6):
            return f" Did you mean '{path}{near[0]}'?"
        prefix = name.rpartition(".")[0]
        siblings = sorted({key.partition(".")[0] for key in known if key.startswith(prefix)})
        return f" Valid keys: {', '.join(siblings)}." if siblings else ""


def _is_option(argument: str) -> bool:
    """Whether an argument is an option rather than a value such as ``-1`` or ``-1e-6``."""
    return argument.startswith("-") and not argument[1:2].isdigit() and argument[1:2] != "."


def _with_groups(known: Mapping[str, Any]) -> list[str]:
    """Keys and the sections they lie in."""
    groups = {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
    return [*known, *groups]


def _mapped_hint(hint: Any) -> Any:
    """Type of the values, when a hint is a mapping or one or nothing; ``None`` for any other hint."""
    if typing.get_origin(hint) is dict:
        return typing.get_args(hint)[1]
    found = [element for item in typing.get_args(hint) if (element := _mapped_hint(item)) is not None]
    return found[0] if len(found) == 1 and typing.get_origin(hint) is not list else None


def _only_dataclass(hint: Any) -> Any:
    """The dataclass a hint names, when it names exactly one."""
    found = [item for item in plain_types(hint) if isinstance(item, type) and dataclasses.is_dataclass(item)]
    return found[0] if len(found) == 1 else None
