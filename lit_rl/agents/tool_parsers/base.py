"""What all tool parsers share: their results, and the search for calls outside of reasoning.

Position in the flow: sampled ids -> decode -> **parser** -> ToolSession. A parser takes text apart and checks
nothing against the tools: the session decodes the arguments and answers what is wrong. It never raises, runs in
linear time, and yields a call only once it is complete, so that parsing a longer text never takes a call back.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_decoder = json.JSONDecoder(strict=False)


@dataclass(kw_only=True, slots=True)
class FunctionCall:
    """One call as the policy wrote it.

    Attributes:
        name: Name of the tool.
        arguments: JSON text, unchecked.
        tool_call_id: Identity, where the format has one.
    """

    name: str
    arguments: str
    tool_call_id: str | None = None


@dataclass(slots=True)
class ParsedMessage:
    """An assistant message taken apart; unpacks into ``content, calls``.

    Attributes:
        content: Text outside of the calls.
        calls: Complete calls, in order.
        malformed: One short reason for every call that is complete but unreadable.
    """

    content: str
    calls: list[FunctionCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Any]:
        yield self.content
        yield self.calls


class ToolParser(ABC):
    """Finds the tool calls in what a model sampled."""

    @abstractmethod
    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, is_truncated: bool = False
    ) -> ParsedMessage:
        """Take a message apart.

        Args:
            text: Decoded message, special tokens included.
            tools: OpenAI tool schemas, for formats whose values have no type of their own.
            is_truncated: Whether the token limit cut the message: formats that tolerate a missing end then do not.
        """

    def parse_ids(
        self,
        token_ids: Sequence[int],
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        is_truncated: bool = False,
    ) -> ParsedMessage:
        """Decode sampled ids and take the message apart; end tokens are left out of the content."""
        text = tokenizer.decode(list(token_ids), skip_special_tokens=False)
        message = self.parse(text, tools, is_truncated=is_truncated)
        message.content = _strip_end_tokens(message.content, tokenizer)
        return message


class TaggedToolParser(ToolParser):
    """Base of the formats that open each call with a tag, which does not count inside ``<think>``.

    Subclasses set `opening` and define `parse_block`. A ``</think>`` without its opening tag ends reasoning that the
    chat template began: calls before it were drafts.
    """

    opening: str

    def __init__(self) -> None:
        self._marks = re.compile(rf"<think>|</think>|{re.escape(self.opening)}")

    def parse(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None = None, *, is_truncated: bool = False
    ) -> ParsedMessage:
        """See `ToolParser.parse`."""
        if self.opening not in text:
            return ParsedMessage(text)
        message = ParsedMessage("")
        kept: list[str] = []
        kept_from = position = 0
        while (mark := self._marks.search(text, position)) is not None:
            position = mark.end()
            if mark.group() == "<think>":
                end = text.find("</think>", position)
                if end < 0:
                    break
                position = end + len("</think>")
            elif mark.group() == "</think>":
                message.calls.clear()
                message.malformed.clear()
                kept, kept_from = [], 0
            else:
                block_end, calls = self.parse_block(text, position, tools, is_truncated)
                if block_end is None:
                    break
                position = block_end
                if isinstance(calls, str):
                    message.malformed.append(calls)
                elif calls:
                    message.calls.extend(calls)
                    kept.append(text[kept_from : mark.start()])
                    kept_from = position
        kept.append(text[kept_from:])
        message.content = self.join_content(text, kept, message)
        return message

    @abstractmethod
    def parse_block(
        self, text: str, start: int, tools: Sequence[Mapping[str, Any]] | None, is_truncated: bool
    ) -> tuple[int | None, list[FunctionCall] | str]:
        """Read the calls that follow an opening tag.

        Args:
            text: The whole message.
            start: First character after the tag.
            tools: See `ToolParser.parse`.
            is_truncated: See `ToolParser.parse`.

        Returns:
            Where the block ends (``None``: it does not), and its calls, or the reason why they are unreadable. Without
            calls the block stays in the content.
        """

    def join_content(self, text: str, kept: list[str], message: ParsedMessage) -> str:
        """Put the content together from the pieces between calls."""
        return "".join(kept)


def decode_json_at(text: str, start: int) -> tuple[Any, int] | None:
    """Return the JSON value at ``start`` (spaces skipped) and where it ends; ``None`` where there is none."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    try:
        return _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def calls_from_json(value: Any, argument_keys: tuple[str, ...] = ("arguments",)) -> list[FunctionCall] | str:
    """Return the calls that a decoded JSON value describes, or why it describes none.

    Args:
        value: An object with ``name`` and arguments, or a list of them.
        argument_keys: Keys that may hold the arguments, best first.
    """
    calls = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict):
            return "a call must be a JSON object"
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            return "a call needs a 'name' that is a text"
        key = next((key for key in argument_keys if key in entry), None)
        if key is None:
            return f"the call of '{name[:100]}' has no '{argument_keys[0]}'"
        call_id = entry.get("id")
        calls.append(
            FunctionCall(
                name=name,
                arguments=json.dumps(entry[key], ensure_ascii=False),
                tool_call_id=call_id if isinstance(call_id, str) else None,
            )
        )
    return calls


def skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is no white space."""
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _strip_end_tokens(content: str, tokenizer: Any) -> str:
    end_tokens = [token for token in getattr(tokenizer, "all_special_tokens", ()) if token]
    end = len(content)
    while (token := next((token for token in end_tokens if content.endswith(token, 0, end)), None)) is not None:
        end -= len(token)
    return content[:end]
