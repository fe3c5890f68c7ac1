"""Calls as nested tags with untyped values: Qwen3-Coder."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.agents.tool_parsers.base import FunctionCall, ParsedMessage, TaggedToolParser

_FUNCTION = "<function="
_PARAMETER = "<parameter="
_STRINGS = ("string", "str", "text", "varchar", "char", "enum")


class Qwen3CoderToolParser(TaggedToolParser):
    """``<tool_call><function=NAME><parameter=P>VALUE</parameter></function></tool_call>``.

    Values get the type that the tool's schema gives them. Missing end tags are tolerated up to the end of the text,
    unless the message was truncated. Content is the text before the first call.
    """

    opening = "<tool_call>"

    def parse_block(
        self, text: str, start: int, tools: Sequence[Mapping[str, Any]] | None, is_truncated: bool
    ) -> tuple[int | None, list[FunctionCall] | str]:
        """See `TaggedToolParser.parse_block`."""
        closing = text.find("</tool_call>", start)
        if closing < 0 and is_truncated:
            return None, []
        # The next block bounds an unclosed one.
        following = text.find(self.opening, start)
        ends = [end for end in (closing, following) if end >= 0]
        end = min(ends, default=len(text))
        body = text[start:end]
        after = end + len("</tool_call>") if end == closing else end
        calls = []
        for piece in body.split(_FUNCTION)[1:]:
            name, bracket, parameters = piece.partition(">")
            if bracket and name.strip():
                calls.append(_read_call(name.strip(), parameters.partition("</function>")[0], tools))
        return after, calls or "there is no <function=NAME> between <tool_call> and </tool_call>"

    def join_content(self, text: str, kept: list[str], message: ParsedMessage) -> str:
        """Text before the first call."""
        return kept[0]


def _read_call(name: str, body: str, tools: Sequence[Mapping[str, Any]] | None) -> FunctionCall:
    types = _parameter_types(name, tools)
    arguments: dict[str, Any] = {}
    for piece in body.split(_PARAMETER)[1:]:
        key, bracket, value = piece.partition(">")
        if bracket:
            value = value.partition("</parameter>")[0]
            arguments[key.strip()] = _convert(value.removeprefix("\n").removesuffix("\n"), types.get(key.strip()))
    return FunctionCall(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _parameter_types(name: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    for tool in tools or ():
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: _first_type(schema) for key, schema in properties.items()}
    return {}


def _first_type(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "")
    if isinstance(kind, list):
        kind = next((entry for entry in kind if entry != "null"), "")
    return str(kind).strip().lower()


def _convert(value: str, kind: str | None) -> Any:
    """Give a value the type of its schema; what does not fit stays text, and the schema check then says so."""
    if value.lower() == "null":
        return None
    if kind is None or kind in _STRINGS:
        return value
    try:
        if kind.startswith(("int", "uint", "long", "short", "unsigned")):
            return int(value)
        if kind.startswith(("num", "float")):
            number = float(value)
            return int(number) if number.is_integer() else number
        if kind in ("boolean", "bool", "binary"):
            return {"true": True, "false": False}.get(value.strip().lower(), value)
        if kind in ("object", "array", "dict", "list"):
            return _read_container(value)
        return _read_literal(value)
    except (ValueError, SyntaxError, OverflowError, TypeError, MemoryError, RecursionError):
        return value


def _read_container(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return _read_literal(value)


def _read_literal(value: str) -> Any:
    literal = ast.literal_eval(value)
    json.dumps(literal)  # sets, bytes and the like have no JSON form: TypeError
    return literal
