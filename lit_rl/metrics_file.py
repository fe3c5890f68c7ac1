"""``metrics.csv`` of a run: one row per iteration, training and validation metrics side by side.

Lightning's CSVLogger writes one row per call, so that an iteration with validation takes two, and refuses a folder
that holds other files. This one keeps its interface and merges what is logged for the same step. It writes at once and
holds only the newest rows in memory: a killed run loses nothing that was logged.
"""

from __future__ import annotations

import csv
import io
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core.rank_zero import rank_zero_only

METRICS_FILE = "metrics.csv"
_OPEN_ROWS = 4


class MetricsTable:
    """The file itself: rows keyed by ``step``, the columns growing as metrics appear.

    The validation after iteration ``i`` scores weights version ``i + 1`` and is logged before the iteration's own
    metrics, so the newest few rows stay open for additions.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / METRICS_FILE
        self._columns: list[str] = ["step"]
        self._open_rows: dict[int, dict[str, Any]] = {}
        self._open_offset = 0

    def add(self, metrics: dict[str, float], step: int) -> None:
        """Merge ``metrics`` into the row of ``step`` and write it.

        Args:
            metrics: Plain numbers by name.
            step: Iteration, or weights version of a validation.
        """
        self._open_rows.setdefault(step, {"step": step}).update(metrics)
        new_columns = sorted({name for name in metrics if name not in self._columns})
        if new_columns or not self.path.exists():
            self._columns += new_columns
            self._rewrite_closed_rows()
        self._write_open_rows()
        while len(self._open_rows) > _OPEN_ROWS:
            del self._open_rows[min(self._open_rows)]
            self._open_offset = self._offset_after_first_open_row

    def _write_open_rows(self) -> None:
        with self.path.open("r+", newline="") as file:
            file.seek(self._open_offset)
            file.truncate()
            writer = csv.DictWriter(file, self._columns)
            for number, step in enumerate(sorted(self._open_rows)):
                writer.writerow(self._open_rows[step])
                if number == 0:
                    self._offset_after_first_open_row = file.tell()

    def _rewrite_closed_rows(self) -> None:
        """Write the rows that are closed again under the present columns, beside the old file, and swap."""
        rows: list[dict[str, str]] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                rows = list(csv.DictReader(io.StringIO(file.read(self._open_offset), newline="")))
        aside = self.path.with_suffix(".partial")
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(aside, self.path)
        self._open_offset = self.path.stat().st_size


class MetricsFileLogger(CSVLogger):
    """Lightning logger that keeps ``metrics.csv`` in a run folder.

    Args:
        run_folder: Folder of the run; the file lies directly in it.
    """

    def __init__(self, run_folder: str | Path) -> None:
        super().__init__(save_dir=run_folder, name="", version="")
        self._table = MetricsTable(Path(run_folder))

    @property
    def log_dir(self) -> str:
        """The run folder."""
        return self.save_dir

    @property
    def experiment(self) -> MetricsTable:  # type: ignore[override]
        """The table that is written."""
        return self._table

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        """Write one row, or add to the row of the same step.

        Args:
            metrics: Plain numbers by name.
            step: Iteration.
        """
        # Seven digits are what a float32 holds.
        plain = {name: float(f"{float(value):.7g}") for name, value in metrics.items()}
        self._table.add(plain, step=0 if step is None else step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None) -> None:  # type: ignore[override]
        """Nothing: ``config.yaml`` holds the whole configuration.

        Args:
            params: Ignored.
        """

    def save(self) -> None:
        """Nothing: every row is written when it is logged."""

    def finalize(self, status: str) -> None:
        """Nothing: every row is written when it is logged.

        Args:
            status: How the run ended.
        """
