"""Calls as JSON in fenced code blocks, for models without a format of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.agents.tool_parsers.base import (
    FunctionCall,
    TaggedToolParser,
    calls_from_json,
    decode_json_at,
    skip_space,
)

_FENCE = "```"
_LANGUAGE = re.compile(r"(json|tool_call|tool_code|tool)?[ \t]*\n")


class FencedJsonToolParser(TaggedToolParser):
    """A fenced block (language ``json``, ``tool_call`` or none) that holds ``{"name": ..., "arguments": {...}}``.

    Other code blocks, and JSON without a name, are content.
    """

    opening = _FENCE

    def parse_block(
        self, text: str, start: int, tools: Sequence[Mapping[str, Any]] | None, is_truncated: bool
    ) -> tuple[int | None, list[FunctionCall] | str]:
        """See `TaggedToolParser.parse_block`."""
        language = _LANGUAGE.match(text, start)
        decoded = decode_json_at(text, language.end()) if language else None
        if decoded is not None:
            value, end = decoded
            end = skip_space(text, end)
            if text.startswith(_FENCE, end):
                calls = calls_from_json(value, ("arguments", "parameters"))
                end += len(_FENCE)
                if isinstance(calls, list) and calls:
                    return end, calls
                if isinstance(value, dict) and "name" in value and language and language.group(1) == "tool_call":
                    return end, calls
        end = text.find(_FENCE, start)
        return (None, []) if end < 0 else (end + len(_FENCE), [])
