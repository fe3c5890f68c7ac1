"""Demonstrations to imitate: whole conversations, checked, out of files or a class of your own.

Position in the flow: **conversation source** -> conversation tokens -> supervised fine-tuning. Every row is checked
when the source is built, and an error names the place of the row and the column.

Columns: ``messages`` (list of ``{role, content}`` in OpenAI's form, with at least one assistant message), and optional
``tools`` (list of OpenAI function schemas shown to the model). Either may be JSON text, which is how Parquet holds
values of varying shape. An assistant message with ``"weight": 0`` is read but not learned.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lit_rl.data.prompt_dataset import choose_rows
from lit_rl.data.prompt_rows import PromptSource, as_plain
from lit_rl.data.row_files import read_rows
from lit_rl.types import Message

_CONTENT_KEYS = ("content",)


@dataclass(kw_only=True)
class Conversation:
    """One demonstration.

    Attributes:
        row_id: Stands for the content: the place in the rows is only taken up again over the same ids.
        messages: The whole conversation; the assistant's messages are learned.
        tools: OpenAI function schemas shown to the model; empty for none.
    """

    row_id: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@runtime_checkable
class ConversationSource(Protocol):
    """Anything that holds conversations by index: files, or a class of your own given by ``class_path``.

    The same index must give the same conversation every time.
    """

    def __len__(self) -> int:
        """Return the number of conversations."""
        ...

    def __getitem__(self, index: int) -> Conversation:
        """Return one conversation; ``index`` is in ``[0, len)``."""
        ...


class ConversationFiles:
    """Conversations of one or more files, in file order.

    Args:
        files: Paths ending in ``.parquet``, ``.json`` (one list of rows) or ``.jsonl`` (one row a line).
        messages_column: Column with the messages.
        tools_column: Column with the tools' schemas; may be missing.
        max_samples: Most rows to keep. Default: all.
        sample_seed: Seed of the random subset that ``max_samples`` keeps. Default: the first rows are kept.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file has another suffix, is empty or cannot be parsed, or a row is malformed; the message names
            file, row (counted from 0), column and the columns present.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        messages_column: str = "messages",
        tools_column: str = "tools",
        max_samples: int | None = None,
        sample_seed: int | None = None,
    ) -> None:
        paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str | Path) else files)]
        if not paths:
            raise ValueError("ConversationFiles: files is empty. Give at least one file.")
        if max_samples is not None and max_samples < 1:
            raise ValueError(
                f"ConversationFiles: max_samples={max_samples} must be at least 1; leave it out for all rows."
            )
        conversations = [
            conversation_from_row(
                row, place, columns=columns, messages_column=messages_column, tools_column=tools_column
            )
            for path in paths
            for row, place, columns in read_rows(path, "conversation")
        ]
        self._conversations = choose_rows(conversations, max_samples, sample_seed)

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]


class AnsweredPrompts:
    """The prompts of a source, each with an answer made of its ground truth: questions with known answers as a warm-up.

    Args:
        prompts: Any prompt source; its data may be the one that RL goes on with.
        answer: The assistant's text, with ``{ground_truth}`` where the row's goes.
        max_samples: Most rows to keep. Default: all.
        sample_seed: Seed of the random subset that ``max_samples`` keeps. Default: the first rows are kept.

    Raises:
        ValueError: If ``answer`` does not name the ground truth, or a row has none.
    """

    def __init__(
        self,
        prompts: PromptSource,
        answer: str = "{ground_truth}",
        max_samples: int | None = None,
        sample_seed: int | None = None,
    ) -> None:
        if "{ground_truth}" not in answer:
            raise ValueError(f"AnsweredPrompts: answer={answer!r} must hold {{ground_truth}}, the row's own answer.")
        rows = choose_rows([prompts[index] for index in range(len(prompts))], max_samples, sample_seed)
        self._conversations: list[Conversation] = []
        for prompt in rows:
            if prompt.ground_truth is None:
                raise ValueError(f"AnsweredPrompts: row {prompt.row_id} has no ground truth to answer with.")
            text = answer.replace("{ground_truth}", str(prompt.ground_truth))
            messages = [*prompt.messages, {"role": "assistant", "content": text}]
            self._conversations.append(Conversation(row_id=prompt.row_id, messages=messages))

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, index: int) -> Conversation:
        return self._conversations[index]


def conversation_from_row(
    row: dict[str, Any],
    place: str,
    *,
    columns: Sequence[str] | None = None,
    messages_column: str = "messages",
    tools_column: str = "tools",
) -> Conversation:
    """Return the checked conversation of one row.

    Args:
        row: Column name to value.
        place: Where the row comes from, for errors: ``"traces.jsonl, row 3"``.
        columns: Columns the file has; default: those of the row.
        messages_column: Column with the messages.
        tools_column: Column with the tools' schemas.

    Raises:
        ValueError: If a column is missing or malformed.
    """
    present = ", ".join(sorted(columns if columns is not None else row)) or "none"

    def refuse(column: str, what: str) -> ValueError:
        return ValueError(f"{place}: column {column!r} {what}. Columns present: {present}.")

    messages = _plain(row.get(messages_column), messages_column, refuse)
    if not isinstance(messages, list) or not messages:
        raise refuse(messages_column, "must be a list of {role, content} messages, at least one")
    check_messages(messages, lambda what: refuse(messages_column, what))
    tools = _plain(row.get(tools_column), tools_column, refuse) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise refuse(tools_column, "must be a list of function schemas")
    content = json.dumps([messages, tools], sort_keys=True, default=str)
    return Conversation(
        row_id=hashlib.blake2b(content.encode(), digest_size=8).hexdigest(),
        messages=[_with_plain_arguments(message) for message in messages],
        tools=tools,
    )


def check_messages(messages: Sequence[Any], refuse: Any) -> None:
    """Raise what ``refuse`` makes of a fault, unless the messages are a conversation with something to learn.

    Args:
        messages: What the row holds.
        refuse: Returns the error of a text such as ``"has a message 2 without a role"``.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refuse(f"has a message {index} without a role: {message!r}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise refuse(f"has a message {index} (role {message['role']!r}) without content")
        if isinstance(message.get("content"), list):
            raise refuse(f"has a message {index} whose content is a list; conversations are text only")
        if message.get("weight") not in (None, 0, 1):
            raise refuse(f"has a message {index} with weight {message['weight']!r}; it is 0 or 1")
    roles = [message["role"] for message in messages]
    if not any(is_learned(message) for message in messages):
        raise refuse("has no assistant message (of weight 1), so there is nothing to learn")
    if roles[0] == "assistant":
        raise refuse("begins with an assistant message; put what it answers before it")
    for index in range(1, len(roles)):
        if roles[index - 1] == roles[index] == "assistant":
            raise refuse(f"has two assistant messages in a row (message {index}); join them")


def is_learned(message: Message) -> bool:
    """Whether a message is the policy's and counts."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _plain(value: Any, column: str, refuse: Any) -> Any:
    """Value of a column without the nulls that Parquet fills in; JSON text is read."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise refuse(column, f"is text, but no valid JSON: {error}") from error
    return _without_nulls(as_plain(value))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None or k in _CONTENT_KEYS}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _with_plain_arguments(message: Message) -> Message:
    """The message with its calls' arguments as objects: OpenAI writes them as JSON text, templates read objects."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function") or {})
        if isinstance(function.get("arguments"), str):
            with contextlib.suppress(json.JSONDecodeError):  # the template writes the text as it is
                function["arguments"] = json.loads(function["arguments"])
        calls.append({"type": "function", **call, "function": function})
    # A template may add something to content, and None is no text.
    return {**message, "content": message.get("content") or "", "tool_calls": calls}
