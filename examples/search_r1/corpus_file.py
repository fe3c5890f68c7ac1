"""A corpus of passages on disk, a JSON object a line, read through a memory map: only what is used is in memory."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_NEWLINE = 10
_SCAN_BYTES = 64 * 2**20
_CHECKED_BYTES = 2**30


class CorpusFile:
    """Passages by number.

    Args:
        path: Each line an object with a text ``contents``: title line, newline, body. Further keys are passed on.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is empty, or a line is no such object; the message has the line's number. In files over 1 GiB
            lines are checked when they are read, in smaller ones at once.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(
                f"--corpus_path {path}: there is no such file. corpus.py writes one, download.py fetches one."
            )
        self.path = path
        if path.stat().st_size == 0:
            raise ValueError(f"--corpus_path {path}: the file is empty.")
        self._file = path.open("rb")
        self._bytes = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = _line_ends(self._bytes)
        if len(self._bytes) <= _CHECKED_BYTES:
            for number in range(len(self)):
                self[number]

    def __len__(self) -> int:
        """Passages."""
        return len(self._ends)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a passage, numbered from 0."""
        start = int(self._ends[number - 1]) + 1 if number else 0
        place = f"--corpus_path {self.path}, line {number + 1}"
        try:
            passage = json.loads(self._bytes[start : int(self._ends[number])])
        except ValueError as error:
            raise ValueError(
                f"{place}: is no JSON: {error}. Remove or mend the line, and build the index again."
            ) from None
        if not isinstance(passage, dict) or not isinstance(passage.get("contents"), str):
            raise ValueError(f'{place}: must be an object with a text "contents" (title line, newline, body).')
        return passage

    def texts(self, start: int, stop: int) -> Iterator[str]:
        """Yield ``contents`` of a range."""
        for number in range(start, stop):
            yield self[number]["contents"]

    def close(self) -> None:
        """Unmap the file."""
        self._bytes.close()
        self._file.close()


def _line_ends(content: mmap.mmap) -> np.ndarray:
    """Return the position after each line's last byte; a last line may lack its newline."""
    parts = []
    for start in range(0, len(content), _SCAN_BYTES):
        part = np.frombuffer(content[start : start + _SCAN_BYTES], dtype=np.uint8)
        parts.append(np.flatnonzero(part == _NEWLINE).astype(np.int64) + start)
    if content[-1] != _NEWLINE:
        parts.append(np.array([len(content)], dtype=np.int64))
    return np.concatenate(parts)
