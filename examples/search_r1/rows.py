"""Rows of prompt files in verl's columns for search questions, and how they are written.

Used by corpus.py (generated questions) and prepare_search_r1.py (public ones).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DATA_SOURCE_PREFIX = "searchR1_"
"""The scorer of these rows is chosen by it."""


def search_row(
    *,
    data_source: str,
    index: int,
    split: str,
    question: str,
    system: str,
    user: str,
    answers: Sequence[str],
    ability: str = "fact-reasoning",
    reward_model: Mapping[str, Any] | None = None,
    metadata: Any = None,
    agent_name: str | None = None,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return one row.

    Args:
        data_source: Without the prefix, or with it.
        index: Number of the row in its split; unique.
        split: ``train``, ``test``, ...
        question: The question alone.
        system: Text of the system message.
        user: Text of the user message.
        answers: Right answers, for the tools and, without ``reward_model``, for the reward.
        ability: Informational.
        reward_model: Copied where it is given.
        metadata: Copied.
        agent_name: Agent loop of this row; ``None`` leaves it to the configuration.
        extra_info: Further entries.
    """
    tagged = data_source if data_source.startswith(DATA_SOURCE_PREFIX) else DATA_SOURCE_PREFIX + data_source
    reward_model = reward_model or {"ground_truth": {"target": list(answers)}, "style": "rule"}
    ground_truth = reward_model.get("ground_truth", list(answers))
    create_kwargs = {"ground_truth": ground_truth, "question": question, "data_source": tagged}
    row = {
        "data_source": tagged,
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "ability": ability,
        "reward_model": dict(reward_model),
        "extra_info": {
            "index": index,
            "need_tools_kwargs": True,
            "question": question,
            "split": split,
            "tools_kwargs": {"search": {"create_kwargs": create_kwargs}},
            **(extra_info or {}),
        },
        "metadata": metadata,
    }
    return row if agent_name is None else {**row, "agent_name": agent_name}


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows under a temporary name and rename: the file is complete or not there."""
    import pyarrow
    import pyarrow.parquet

    aside = path.with_name(path.name + ".partial")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), aside)
    aside.replace(path)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, under a temporary name first."""
    aside = path.with_name(path.name + ".partial")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    aside.replace(path)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file written by `write_json_lines`."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]
