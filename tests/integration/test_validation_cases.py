"""Validation from end to end: every row once over any number of workers, per data source, dumped as it was scored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_fit import TinyFit, tiny_data, tiny_fit

from lit_rl.agents import AgentSettings
from lit_rl.callbacks import TrajectoryLog
from lit_rl.types import Prompt

pytestmark = pytest.mark.usefixtures("nothing_left")


def _rows(scores: Sequence[float], source: str = "cases") -> list[Prompt]:
    return [
        Prompt(
            row_id=f"{source}/{number}",
            messages=[{"role": "user", "content": f"What is {number} + 1?"}],
            data_source=source,
            ground_truth=str(score),
        )
        for number, score in enumerate(scores)
    ]


def _validate(rows: list[Prompt], folder: Path, **options: Any) -> tuple[TinyFit, dict[str, float]]:
    """The reward is what the row says, so that means are known."""
    data = tiny_data(
        lambda solution_str, ground_truth: float(ground_truth),
        val_data=rows,
        agents=AgentSettings(num_workers=4),
        **options,
    )
    run = tiny_fit(data=data, callbacks=[TrajectoryLog()], default_root_dir=folder)
    (metrics,) = run.trainer.validate(run.module, datamodule=data, verbose=False)
    return run, metrics


def _dumped(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trajectories/validation.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("scores", "mean"),
    [([1] * 8 + [0] * 2, 0.8), ([1, 1, 1, 1, 0], 0.8), ([1, 0, 0], 1 / 3)],
    ids=["O36 ten rows", "O37 five rows on four shards", "O36 fewer rows than shards"],
)
def test_every_row_counts_once_and_is_dumped_once(scores, mean, tmp_path) -> None:
    run, metrics = _validate(_rows(scores), tmp_path)

    assert metrics["val-core/cases/reward/mean@1"] == pytest.approx(mean)
    assert len(run.data.last_validation_trajectories) == len(scores)
    dumped = _dumped(tmp_path)
    assert sorted(row["row_id"] for row in dumped) == sorted(f"cases/{number}" for number in range(len(scores)))
    assert sum(row["score"] for row in dumped) == sum(scores)


def test_data_sources_are_measured_apart_and_samples_of_a_row_together(tmp_path) -> None:  # D17
    rows = [*_rows([1, 0, 0], "many"), *_rows([1], "one")]

    run, metrics = _validate(rows, tmp_path, val_samples_per_row=4)

    # Without grouping by row the chance that one of two samples is right would not be the share of right rows.
    for source, mean in (("many", 1 / 3), ("one", 1.0)):
        for name in ("mean@4", "pass@2", "pass@4", "best@4/mean"):
            assert metrics[f"val-core/{source}/reward/{name}"] == pytest.approx(mean)
    assert len({t.seed for t in run.data.last_validation_trajectories}) == 16
    assert {row["data_source"] for row in _dumped(tmp_path)} == {"many", "one"}
