"""Read prompts from Parquet, JSON and JSON-lines files.

Position in the flow: **files** -> prompt cursor -> agent loops. Rows are read and checked once, when the object is
built, and kept in memory as `Prompt` objects; the files are not opened again. Nothing is tokenised here:
`lit_rl.data.overlong` measures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from lit_rl.data.prompt_rows import check_row_ids, prompt_from_row
from lit_rl.data.row_files import read_rows
from lit_rl.types import Prompt

_Row = TypeVar("_Row")


class PromptFiles:
    """Prompts of one or more files in verl's row schema, in file order.

    Args:
        files: Paths ending in ``.parquet``, ``.json`` (one list of rows) or ``.jsonl`` (one row a line).
        max_samples: Most rows to keep. Default: all.
        sample_seed: Seed of the random subset that ``max_samples`` keeps. Default: the first rows are kept.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file has another suffix, is empty or cannot be parsed, or a row does not follow the schema; the
            message names file, row (counted from 0), column and the columns present.
    """

    def __init__(
        self, files: Sequence[str | Path], max_samples: int | None = None, sample_seed: int | None = None
    ) -> None:
        paths = [Path(file).expanduser() for file in ([files] if isinstance(files, str | Path) else files)]
        if not paths:
            raise ValueError("PromptFiles: files is empty. Give at least one file.")
        placed = [(prompt, place) for path in paths for prompt, place in _read_prompts(path)]
        check_row_ids(placed)
        prompts = [prompt for prompt, _ in placed]
        self._prompts = choose_rows(prompts, max_samples, sample_seed)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def choose_rows(rows: list[_Row], max_samples: int | None, sample_seed: int | None) -> list[_Row]:
    """Return at most ``max_samples`` rows in their order: the first ones, or with a seed a random subset.

    Raises:
        ValueError: If ``max_samples`` is below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples={max_samples} must be at least 1; leave it out for all rows.")
    if max_samples is None or max_samples >= len(rows):
        return rows
    if sample_seed is None:
        return rows[:max_samples]
    chosen = random.Random(sample_seed).sample(range(len(rows)), max_samples)
    return [rows[index] for index in sorted(chosen)]


def _read_prompts(path: Path) -> Iterator[tuple[Prompt, str]]:
    for row, place, columns in read_rows(path, "prompt"):
        yield prompt_from_row(row, place, columns=columns), place
