"""Print how validation moved over a run, read from its metrics.csv: first value, last value, and where the plot is.

Run: python examples/accuracy_of_run.py runs/grpo_arithmetic/<time>, or a folder above it for the newest run in there.
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

REWARD = re.compile(r"val-core/(?P<source>.+)/reward/mean@\d+")


def newest_run(folder: Path) -> Path:
    """The folder itself if it is a run, else the newest run in it."""
    files = list(folder.rglob("metrics.csv"))
    if not files:
        raise SystemExit(f"{folder}: no run with a metrics.csv here.")
    return max(files, key=lambda file: file.stat().st_mtime).parent


def validations(run: Path) -> dict[str, list[tuple[int, float]]]:
    """By data source and measure: weights version (0 is before training) and mean over the rows, oldest first.

    The measure is the scorer's own ``acc`` where it returns one, else the reward.
    """
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    points: dict[str, list[tuple[int, float]]] = {}
    for name in rows[0] if rows else ():
        if (match := REWARD.fullmatch(name)) is None:
            continue
        accuracy = f"val-aux/{match['source']}/acc/mean"
        column, measure = (accuracy, "accuracy") if accuracy in rows[0] else (name, "reward")
        points[f"{measure}, {match['source']}"] = [
            (int(row["step"]), float(row[column])) for row in rows if row[column]
        ]
    return points


def when(version: int) -> str:
    """In words, how much training a weights version has seen."""
    return "before training" if version == 0 else f"after {version} iterations"


def main() -> None:
    """Print one line per data source, and the plot."""
    run = newest_run(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
    for measure, values in validations(run).items():
        (first, before), (last, after) = values[0], values[-1]
        print(f"Held-out {measure}: {before:.3f} {when(first)}, {after:.3f} {when(last)}.")
    if (run / "reward.png").exists():
        print(f"Plot: {run / 'reward.png'}")


if __name__ == "__main__":
    main()
