"""Check a dataset row in verl's schema and turn it into a `Prompt`.

Position in the flow: file or dataset -> **row** -> prompt source -> prompt cursor. Every row is checked when a source
is built, before an engine starts, and an error names the place of the row, the column and the columns there are.
Whether a scorer exists for the data source is the reward side's to say.

Columns: ``prompt`` (list of ``{role, content}``), ``data_source``, ``reward_model`` (``{style, ground_truth}``), and
optional ``ability``, ``extra_info``, ``agent_name``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from lit_rl.types import Message, Prompt

_MEDIA_COLUMNS = ("images", "videos", "audios")


@runtime_checkable
class PromptSource(Protocol):
    """Anything that holds prompts by index: files, generated tasks, or a class of your own given by ``class_path``.

    The same index must give the same prompt every time, and row ids must differ.
    """

    def __len__(self) -> int:
        """Return the number of prompts."""
        ...

    def __getitem__(self, index: int) -> Prompt:
        """Return one prompt; ``index`` is in ``[0, len)``."""
        ...


class PromptRowError(ValueError):
    """A row or file does not follow the schema."""


def prompt_from_row(row: dict[str, Any], place: str, *, columns: Sequence[str] | None = None) -> Prompt:
    """Return the checked prompt of one row.

    Missing entries of nested columns that Parquet fills with nulls are dropped, NumPy arrays become lists. The row id
    is made of ``data_source``, ``extra_info.split`` and ``extra_info.index``; without an index it is a hash of
    messages and ground truth.

    Args:
        row: Column name to value.
        place: Where the row comes from, for errors: ``"train.parquet, row 3"``.
        columns: Columns the file has; default: those of the row.

    Raises:
        PromptRowError: If a column is missing or malformed.
    """
    row = {str(key): as_plain(value) for key, value in row.items()}
    present = sorted(columns if columns is not None else row)

    def refuse(column: str, what: str) -> PromptRowError:
        if row.get(column) is None:
            what = f"is missing or null: {what}"
        return PromptRowError(f"{place}: column {column!r} {what}. Columns present: {', '.join(present) or 'none'}.")

    messages = row.get("prompt")
    if not messages:
        raise refuse("prompt", "must be a list of {role, content} messages, at least one")
    _check_messages(messages, refuse)
    data_source = row.get("data_source")
    if not isinstance(data_source, str) or not data_source:
        raise refuse("data_source", f"must be a text, not {data_source!r}; it chooses the scorer")
    for column in _MEDIA_COLUMNS:
        if row.get(column):
            raise refuse(column, "holds media, but prompts are text only; drop the column or the rows")
    extra_info = row.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        raise refuse("extra_info", f"must be a mapping, not {type(extra_info).__name__}")
    _check_tools_kwargs(extra_info.get("tools_kwargs"), refuse)
    agent_name = row.get("agent_name")
    if agent_name is not None and not isinstance(agent_name, str):
        raise refuse("agent_name", f"must be the name of an agent loop or null, not {agent_name!r}")
    ground_truth = _ground_truth(row.get("reward_model"), refuse)
    return Prompt(
        row_id=_row_id(messages, data_source, ground_truth, extra_info),
        messages=[_drop_nulls(message, keep=("content",)) for message in messages],
        data_source=data_source,
        ground_truth=ground_truth,
        ability=str(row.get("ability") or ""),
        extra_info=_drop_nulls(extra_info),
        agent_name=agent_name,
    )


def check_row_ids(prompts: Iterable[tuple[Prompt, str]]) -> None:
    """Raise unless all row ids differ.

    Args:
        prompts: Pairs of a prompt and its place.

    Raises:
        PromptRowError: Names both rows.
    """
    places: dict[str, str] = {}
    for prompt, place in prompts:
        if prompt.row_id in places:
            raise PromptRowError(
                f"{place}: row id {prompt.row_id!r} is taken by {places[prompt.row_id]}. Rows are told apart by "
                "data_source, extra_info.split and extra_info.index, or by their content where there is no index: "
                "make the index unique, or remove the double row."
            )
        places[prompt.row_id] = place


def as_plain(value: Any) -> Any:
    """Return a value with NumPy arrays and scalars, at any depth, as lists and plain numbers."""
    if isinstance(value, dict):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_plain(item) for item in value]
    # Both arrays and scalars of NumPy have tolist; array elements may hold further arrays.
    return as_plain(value.tolist()) if hasattr(value, "tolist") else value


def _check_messages(messages: Any, refuse: Any) -> None:
    if not isinstance(messages, list):
        raise refuse("prompt", f"must be a list of {{role, content}} messages, not {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise refuse("prompt", f"has a message {index} without a role: {message!r}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise refuse("prompt", f"has a message {index} (role {message['role']!r}) without content")


def _check_tools_kwargs(tools_kwargs: Any, refuse: Any) -> None:
    if tools_kwargs is None:
        return
    if not isinstance(tools_kwargs, dict) or any(
        not (kwargs is None or isinstance(kwargs, dict)) for kwargs in tools_kwargs.values()
    ):
        raise refuse("extra_info", f"has tools_kwargs that do not map tool names to mappings: {tools_kwargs!r}")


def _ground_truth(reward_model: Any, refuse: Any) -> Any:
    if not isinstance(reward_model, dict):
        raise refuse("reward_model", f"must be a mapping with ground_truth, not {reward_model!r}")
    ground_truth = reward_model.get("ground_truth")
    # A reward model judges without one.
    if (ground_truth is None or ground_truth == "") and reward_model.get("style") != "model":
        raise refuse("reward_model", "has no ground_truth (only style 'model' may leave it out)")
    return ground_truth


def _row_id(messages: list[Message], data_source: str, ground_truth: Any, extra_info: dict[str, Any]) -> str:
    index = extra_info.get("index")
    if index is None or index == "":
        content = json.dumps([messages, ground_truth], sort_keys=True, default=str)
        return f"{data_source}/{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
    split = extra_info.get("split")
    return f"{data_source}/{split}/{index}" if split else f"{data_source}/{index}"


def _drop_nulls(mapping: dict[str, Any], keep: Sequence[str] = ()) -> dict[str, Any]:
    """Return a mapping without null entries: Parquet gives every row the keys that any row has."""
    return {
        key: _drop_nulls(value) if isinstance(value, dict) else value
        for key, value in mapping.items()
        if value is not None or key in keep
    }
