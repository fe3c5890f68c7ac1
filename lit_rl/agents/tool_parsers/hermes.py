"""Calls as JSON between ``<tool_call>`` tags: Hermes, Qwen2.5, Qwen3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.agents.tool_parsers.base import (
    FunctionCall,
    TaggedToolParser,
    calls_from_json,
    decode_json_at,
    skip_space,
)

_CLOSING = "</tool_call>"


class HermesToolParser(TaggedToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of times.

    The JSON is read to its own end, so braces, brackets and even a closing tag inside a string do no harm. Content
    is the text around the calls.
    """

    opening = "<tool_call>"

    def parse_block(
        self, text: str, start: int, tools: Sequence[Mapping[str, Any]] | None, is_truncated: bool
    ) -> tuple[int | None, list[FunctionCall] | str]:
        """See `TaggedToolParser.parse_block`."""
        decoded = decode_json_at(text, start)
        if decoded is not None:
            value, end = decoded
            end = skip_space(text, end)
            if text.startswith(_CLOSING, end):
                return end + len(_CLOSING), calls_from_json(value)
        end = text.find(_CLOSING, start)
        if end < 0:
            return None, []
        return end + len(_CLOSING), "the text between <tool_call> and </tool_call> is no valid JSON object"
