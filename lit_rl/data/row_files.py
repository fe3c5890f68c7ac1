"""Read the rows of Parquet, JSON and JSON-lines files as plain mappings.

Position in the flow: **files** -> prompts (`lit_rl.data.prompt_dataset`) or demonstrations
(`lit_rl.data.conversation_rows`), which check what the rows hold. A file is read once, from its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SUFFIXES = (".parquet", ".json", ".jsonl")


def read_rows(path: Path, kind: str) -> Iterator[tuple[dict[str, Any], str, list[str] | None]]:
    """Yield each row of a file with its place (``"train.parquet, row 3"``, for errors) and the file's columns.

    Args:
        path: Ends in ``.parquet``, ``.json`` (one list of rows) or ``.jsonl`` (one row a line).
        kind: What the rows are, for errors: ``"prompt"``.

    Yields:
        Row, place, and the columns where the format knows them.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it has another suffix, holds no rows or cannot be parsed, or a row is no mapping.
    """
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"{path}: {kind} files end in {', '.join(_SUFFIXES)}.")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such {kind} file (looked at {path.absolute()}).")
    columns: list[str] | None = None
    if path.suffix == ".parquet":
        columns, rows = _read_parquet(path)
    else:
        rows = _read_json(path) if path.suffix == ".json" else _read_json_lines(path)
    is_empty = True
    for index, row in enumerate(rows):
        is_empty = False
        place = f"{path}, row {index}"
        if not isinstance(row, dict):
            raise ValueError(f"{place}: must be an object with columns, not {type(row).__name__}.")
        yield row, place, columns
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
