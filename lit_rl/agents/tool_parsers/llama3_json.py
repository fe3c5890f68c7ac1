"""Calls as bare JSON: Llama 3.1 and later."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.agents.tool_parsers.base import ParsedMessage, ToolParser, calls_from_json, decode_json_at, skip_space

_PYTHON_TAG = "<|python_tag|>"
_CALL = re.compile(r'\{\s*"(?:name|type)"\s*:')
_KEYS = ("parameters", "arguments")


class Llama3JsonToolParser(ToolParser):
    """``{"name": ..., "parameters": {...}}``, separated by ``;`` or white space, after ``<|python_tag|>`` or text.

    Content is the text before the first call; JSON of another shape is content.
    """

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, is_truncated: bool = False
    ) -> ParsedMessage:
        """See `ToolParser.parse`."""
        visible_from = _end_of_reasoning(text)
        if visible_from is None:
            return ParsedMessage(text)
        message = ParsedMessage(text)
        first_call: int | None = None
        position = visible_from
        while (mark := _CALL.search(text, position)) is not None:
            decoded = decode_json_at(text, mark.start())
            if decoded is None:
                # What is inside a broken object is no call either; a later one may be whole.
                position = _next_candidate(text, mark.end())
                continue
            value, position = decoded
            if isinstance(value, dict) and value.get("type") == "function" and isinstance(value.get("function"), dict):
                value = value["function"]
            calls = calls_from_json(value, _KEYS)
            if isinstance(calls, str):
                continue
            message.calls.extend(calls)
            if first_call is None:
                first_call = mark.start()
            position = skip_space(text, position)
        if first_call is not None:
            message.content = text[:first_call].replace(_PYTHON_TAG, "")
        return message


def _next_candidate(text: str, position: int) -> int:
    """After broken JSON, go on at the next separator, so that the same characters are not read again."""
    ends = [end for end in (text.find(";", position), text.find("\n", position)) if end >= 0]
    return min(ends, default=len(text))


def _end_of_reasoning(text: str) -> int | None:
    end = text.rfind("</think>")
    start = text.rfind("<think>")
    if start > end:
        return None
    return 0 if end < 0 else end + len("</think>")
