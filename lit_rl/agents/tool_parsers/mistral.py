"""Calls after ``[TOOL_CALLS]``: Mistral, all versions of its tokenizer."""

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

_HEADER = re.compile(r"\s*([\w.\-]+)(?:\[CALL_ID\]([\w\-]+))?(?:\[ARGS\])?\s*(?=\{)")


class MistralToolParser(TaggedToolParser):
    """``[TOOL_CALLS] [{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]NAME[ARGS]{...}`` since version 11.

    Content is the text around the calls.
    """

    opening = "[TOOL_CALLS]"

    def parse_block(
        self, text: str, start: int, tools: Sequence[Mapping[str, Any]] | None, is_truncated: bool
    ) -> tuple[int | None, list[FunctionCall] | str]:
        """See `TaggedToolParser.parse_block`."""
        header = _HEADER.match(text, start)
        decoded = decode_json_at(text, header.end() if header else start)
        if decoded is None:
            # There is no closing tag: broken JSON and JSON that is still being written look alike.
            following = text.find(self.opening, start)
            if is_truncated and following < 0:
                return None, []
            end = following if following >= 0 else len(text)
            return end, "what follows [TOOL_CALLS] is no valid JSON"
        value, end = decoded
        if header is not None:
            arguments = text[header.end() : end]
            return end, [FunctionCall(name=header.group(1), arguments=arguments, tool_call_id=header.group(2))]
        return skip_space(text, end), calls_from_json(value)
