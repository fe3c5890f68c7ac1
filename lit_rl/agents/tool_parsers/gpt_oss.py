"""Calls as messages to ``functions.NAME``: gpt-oss, the harmony format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lit_rl.agents.tool_parsers.base import FunctionCall, ParsedMessage, ToolParser

_END = re.compile(r"<\|(?:end|call|return)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


class GptOssToolParser(ToolParser):
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>``.

    The recipient may also stand before the channel. Messages of the analysis channel are reasoning and hold neither
    calls nor content. Arguments are passed on unchecked.
    """

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, is_truncated: bool = False
    ) -> ParsedMessage:
        """See `ToolParser.parse`."""
        if "<|message|>" not in text:
            return ParsedMessage(text)
        message = ParsedMessage("")
        contents = []
        for piece in text.split("<|start|>"):
            header, separator, body = piece.partition("<|message|>")
            if not separator:
                continue
            channel = _CHANNEL.search(header)
            if channel is not None and channel.group(1) == "analysis":
                continue
            end = _END.search(body)
            recipient = _RECIPIENT.search(header)
            if recipient is None:
                contents.append(body[: end.start()] if end else body)
            elif end is not None and end.group() == "<|call|>":
                arguments = body[: end.start()].strip()
                message.calls.append(FunctionCall(name=recipient.group(1), arguments=arguments))
        message.content = "".join(contents)
        return message
