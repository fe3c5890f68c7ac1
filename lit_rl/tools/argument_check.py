"""Decode and check the arguments of a call before the tool sees them.

Position in the flow: parser -> **decode, check** -> tool. The messages are written for the policy, which reads them
as the tool's answer: short, and naming the argument.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from lit_rl.tools.base_tool import BaseTool
from lit_rl.tools.function_tool import FunctionTool

MAX_MESSAGE_CHARS = 400

_PYTHON_TYPES: dict[Any, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_checkers: WeakKeyDictionary[Any, _Checker] = WeakKeyDictionary()


class InvalidArguments(ValueError):
    """The arguments of a call cannot be used; the message is for the policy."""


def decode_arguments(arguments: Any) -> dict[str, Any]:
    """Return the arguments as a dict, from JSON text or a dict.

    A JSON string that itself holds a JSON object is decoded once more, since models often quote twice.

    Raises:
        InvalidArguments: For invalid JSON, NaN or infinity, or anything but an object.
    """
    if isinstance(arguments, str):
        decoded = _loads(arguments)
        if isinstance(decoded, str):
            decoded = _loads(decoded)
    else:
        decoded = arguments
    if not isinstance(decoded, dict):
        kind = "null" if decoded is None else type(decoded).__name__
        raise InvalidArguments(f"the arguments must be a JSON object, not {kind}")
    return decoded


def check_arguments(tool: BaseTool | FunctionTool, arguments: dict[str, Any]) -> None:
    """Check decoded arguments against the tool's full JSON schema.

    Raises:
        InvalidArguments: Naming the first argument that breaks it.
    """
    checker = _checkers.get(tool)
    if checker is None:
        checker = _checkers[tool] = _Checker(tool)
    checker.check(arguments)


def check_tool_schema(tool: BaseTool | FunctionTool) -> None:
    """Raise ``ValueError`` when the tool's parameters are no valid JSON schema."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(_json_schema(tool))
    except SchemaError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        raise ValueError(f"Tool '{tool.name}': parameters.{place} is no valid JSON schema: {error.message}") from error


class _Checker:
    def __init__(self, tool: BaseTool | FunctionTool) -> None:
        self.schema = _json_schema(tool)
        properties: dict[str, Any] = self.schema.get("properties", {})
        self.required = frozenset(self.schema.get("required", ()))
        # A function cannot take a name that is not its parameter; a class tool may.
        self.is_closed = isinstance(tool, FunctionTool)
        self.names = frozenset(properties)
        # Flat schemas of plain types are checked without jsonschema, which takes 10 to 30 us a call.
        self.simple_types = {
            name: _PYTHON_TYPES[schema["type"]]
            for name, schema in properties.items()
            if set(schema) <= {"type", "description"} and schema.get("type") in list(_PYTHON_TYPES)
        }
        self.is_flat = set(self.schema) <= {"type", "properties", "required"}
        self.validator: Any = None

    def check(self, arguments: dict[str, Any]) -> None:
        if self.is_closed and not self.names.issuperset(arguments):
            unknown = sorted(set(arguments) - self.names)
            raise InvalidArguments(
                f"unknown argument {', '.join(unknown)[:100]}; it takes {', '.join(sorted(self.names))}"
            )
        if self.is_flat and self.required.issubset(arguments) and self._are_simple(arguments):
            return
        if self.validator is None:
            from jsonschema import Draft202012Validator

            self.validator = Draft202012Validator(self.schema)
        error = next(self.validator.iter_errors(arguments), None)
        if error is not None:
            place = ".".join(str(part) for part in error.absolute_path)
            raise InvalidArguments(f"{f'{place}: ' if place else ''}{error.message}"[:MAX_MESSAGE_CHARS])

    def _are_simple(self, arguments: dict[str, Any]) -> bool:
        for name, value in arguments.items():
            types = self.simple_types.get(name)
            if types is None or not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                return False
        return True


def _json_schema(tool: BaseTool | FunctionTool) -> dict[str, Any]:
    schema = tool.tool_schema
    assert schema is not None
    return _expand_nullable(schema.function.parameters.model_dump(exclude_unset=True, exclude_none=True))


def _expand_nullable(schema: Any) -> Any:
    """Write OpenAPI's ``nullable: true``, which transformers infers for Optional, as JSON schema."""
    if isinstance(schema, list):
        return [_expand_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    expanded = {key: _expand_nullable(value) for key, value in schema.items()}
    if expanded.get("nullable") is True:
        del expanded["nullable"]
        if "type" in expanded:
            types = expanded["type"] if isinstance(expanded["type"], list) else [expanded["type"]]
            expanded["type"] = [*types, "null"]
        if "enum" in expanded:
            expanded["enum"] = [*expanded["enum"], None]
    return expanded


def _loads(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise InvalidArguments("the arguments are nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidArguments(f"the arguments are invalid JSON: {error}"[:MAX_MESSAGE_CHARS]) from error
    except InvalidArguments:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise InvalidArguments(f"the arguments are invalid JSON: {error}"[:MAX_MESSAGE_CHARS]) from error


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidArguments(f"{name} is not allowed in JSON arguments")
