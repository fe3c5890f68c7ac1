"""Messages of a conversation with tools: the policy's calls, the tools' answers, and answers that are too long.

Pure functions, used by the tool loop.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from lit_rl.agents.tool_parsers import FunctionCall, ParsedMessage
from lit_rl.types import Message

TruncateSide = Literal["left", "right", "middle"]

TRUNCATED = "(truncated)"

# Longer text is cut before it is tokenised; hardly any token stands for more characters.
_MOST_CHARS_PER_TOKEN = 16


def assistant_message(parsed: ParsedMessage, turn: int) -> Message:
    """Return the policy's message, with ``tool_calls`` where it made any.

    Args:
        parsed: The message taken apart.
        turn: Number of the assistant turn; part of the ids of calls that have none.
    """
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call_id(call, turn, index),
                "function": {"name": call.name, "arguments": _arguments(call)},
            }
            for index, call in enumerate(parsed.calls)
        ]
    return message


def tool_message(name: str, text: str, tool_call_id: str) -> Message:
    """Return the answer to one call."""
    return {"role": "tool", "name": name, "tool_call_id": tool_call_id, "content": text}


def call_id(call: FunctionCall | None, turn: int, index: int) -> str:
    """Return the call's own id, or one of nine characters, as Mistral's templates demand."""
    return (call and call.tool_call_id) or f"call{turn % 1000:03d}{index % 100:02d}"


def truncate_text(text: str, max_tokens: int, side: TruncateSide, tokenizer: Any) -> str:
    """Return the text within ``max_tokens`` tokens; where something is left out, a marker stands in its place.

    Args:
        text: Any text.
        max_tokens: Limit in tokens, at least 1; the marker comes on top.
        side: Where to cut: ``left`` keeps the end, ``right`` the beginning, ``middle`` both.
        tokenizer: With ``encode`` and ``decode``.
    """
    # No token is shorter than a byte, so short text need not be tokenised.
    if len(text) <= max_tokens and len(text.encode("utf-8", "surrogatepass")) <= max_tokens:
        return text
    most_chars = max_tokens * _MOST_CHARS_PER_TOKEN
    is_long = len(text) > 2 * most_chars
    if is_long:
        head, tail = _encode(text[:most_chars], tokenizer), _encode(text[-most_chars:], tokenizer)
    else:
        head = tail = _encode(text, tokenizer)
        if len(head) <= max_tokens:
            return text
    if side == "left":
        return f"{TRUNCATED}...{_decode(tail[-max_tokens:], tokenizer).lstrip(_BROKEN)}"
    if side == "right":
        return f"{_decode(head[:max_tokens], tokenizer).rstrip(_BROKEN)}...{TRUNCATED}"
    num_first = (max_tokens + 1) // 2
    num_last = max_tokens - num_first
    first = _decode(head[:num_first], tokenizer).rstrip(_BROKEN)
    last = _decode(tail[len(tail) - num_last :], tokenizer).lstrip(_BROKEN) if num_last else ""
    return f"{first}...{TRUNCATED}...{last}"


# What decoding makes of the bytes of a character that the cut went through.
_BROKEN = "\ufffd"


def _encode(text: str, tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _decode(token_ids: list[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=False))


def _arguments(call: FunctionCall) -> Any:
    """Arguments as an object where they are one: templates render it in their own way; else the policy's text."""
    try:
        arguments = json.loads(call.arguments, strict=False)
    except (ValueError, RecursionError):
        return call.arguments
    return arguments if isinstance(arguments, dict) else call.arguments
