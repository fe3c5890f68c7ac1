"""Read prompts from Parquet, JSON and JSON-lines files.

Position in the flow: **files** -> prompt cursor -> agent loops. Rows are read and checked once, when the object is
built, and kept in memory as `Prompt` objects; the files are not opened again. Nothing is tokenised here:
`lit_rl.data.overlong` measures.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_rl.data.prompt_rows import PromptRowError, check_row_ids, prompt_from_row
from lit_rl.types import Prompt

_SUFFIXES = (".parquet", ".json", ".jsonl")


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


def choose_rows(prompts: list[Prompt], max_samples: int | None, sample_seed: int | None) -> list[Prompt]:
    """Return at most ``max_samples`` prompts in their order: the first ones, or with a seed a random subset.

    Raises:
        ValueError: If ``max_samples`` is below 1.
    """
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples={max_samples} must be at least 1; leave it out for all rows.")
    if max_samples is None or max_samples >= len(prompts):
        return prompts
    if sample_seed is None:
        return prompts[:max_samples]
    chosen = random.Random(sample_seed).sample(range(len(prompts)), max_samples)
    return [prompts[index] for index in sorted(chosen)]


def _read_prompts(path: Path) -> Iterator[tuple[Prompt, str]]:
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: prompt files end in {', '.join(_SUFFIXES)}.")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such prompt file (looked at {path.absolute()}).")
    if path.suffix == ".parquet":
        columns, rows = _read_parquet(path)
    else:
        columns, rows = None, _read_json(path) if path.suffix == ".json" else _read_json_lines(path)
    is_empty = True
    for index, row in enumerate(rows):
        is_empty = False
        place = f"{path}, row {index}"
        if not isinstance(row, dict):
            raise PromptRowError(f"{place}: must be an object with columns, not {type(row).__name__}.")
        yield prompt_from_row(row, place, columns=columns), place
    if is_empty:
        raise ValueError(f"{path}: holds no rows. Columns present: {', '.join(columns or []) or 'none'}.")


def _read_parquet(path: Path) -> tuple[list[str], Iterator[dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: is no readable Parquet file: {error}") from error
    # In batches: the table of a whole file and its Python rows would be in memory at once.
    rows = (row for batch in file.iter_batches(batch_size=4096) for row in batch.to_pylist())
    return list(file.schema_arrow.names), rows


def _read_json(path: Path) -> Iterator[Any]:
    try:
        rows = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: is no valid JSON: {error}. One row a line needs the suffix .jsonl.") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: must hold one list of rows, not {type(rows).__name__}.")
    yield from rows


def _read_json_lines(path: Path) -> Iterator[Any]:
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: is no valid JSON: {error}.") from error
