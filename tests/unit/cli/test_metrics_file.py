from __future__ import annotations

import csv
from pathlib import Path

from lit_rl.metrics_file import MetricsFileLogger


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_metrics_of_one_step_share_a_row(tmp_path) -> None:
    logger = MetricsFileLogger(tmp_path)
    logger.log_metrics({"reward": 0.5}, step=0)
    logger.log_metrics({"validation": 0.25}, step=0)

    assert _rows(tmp_path) == [{"step": "0", "reward": "0.5", "validation": "0.25"}]


def test_a_validation_logged_ahead_of_its_step_waits_for_it(tmp_path) -> None:
    # Validation after iteration i scores version i + 1, and is logged before iteration i.
    logger = MetricsFileLogger(tmp_path)
    for iteration in range(12):
        logger.log_metrics({"validation": iteration + 0.5}, step=iteration + 1)
        logger.log_metrics({"reward": float(iteration)}, step=iteration)

    rows = _rows(tmp_path)
    assert [row["step"] for row in rows] == [str(step) for step in range(13)]
    assert [row["reward"] for row in rows] == [f"{step}.0" for step in range(12)] + [""]
    assert [row["validation"] for row in rows] == [""] + [f"{step}.5" for step in range(12)]


def test_a_metric_that_appears_late_gets_a_column_and_no_row_is_lost(tmp_path) -> None:
    logger = MetricsFileLogger(tmp_path)
    for step in range(10):
        logger.log_metrics({"reward": float(step)}, step=step)
    logger.log_metrics({"late": 1.0}, step=9)
    logger.log_metrics({"later": 2.0}, step=10)

    rows = _rows(tmp_path)
    assert [row["reward"] for row in rows] == [f"{step}.0" for step in range(10)] + [""]
    assert [row["late"] for row in rows] == [""] * 9 + ["1.0", ""]
    assert rows[-1]["later"] == "2.0"


def test_numbers_keep_the_seven_digits_that_float32_has(tmp_path) -> None:
    MetricsFileLogger(tmp_path).log_metrics({"a": 0.10000000149011612, "b": 123456.7, "c": 1e-9}, step=0)

    assert _rows(tmp_path) == [{"step": "0", "a": "0.1", "b": "123456.7", "c": "1e-09"}]
