"""What the runs of the recipe reached, out of their metrics.csv, as a table.

Used by run.py. Questions of all data sources count alike: a mean over sources would weigh forty two-hop questions as
much as a hundred and sixty one-hop ones.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from corpus import NO_TOOL_SOURCE, ONE_HOP_SOURCE, TWO_HOP_SOURCE
from rows import DATA_SOURCE_PREFIX

_HOPS = {"one_hop": DATA_SOURCE_PREFIX + ONE_HOP_SOURCE, "two_hop": DATA_SOURCE_PREFIX + TWO_HOP_SOURCE}
_MEASURES = ("em", "contains", "format", "searches")
_COLUMNS = ("em", "contains", "em_one_hop", "em_two_hop", "format", "searches_one_hop", "searches_two_hop")


def newest_run(runs_dir: Path, run_name: str) -> Path:
    """Return the newest folder of the runs of a name."""
    return max((runs_dir / run_name).iterdir(), key=lambda path: path.stat().st_mtime)


def metrics_rows(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics.csv, without empty cells."""
    with (run / "metrics.csv").open(newline="") as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def validations(run: Path) -> list[dict[str, float]]:
    """Return the rows that hold a validation, oldest first."""
    return [row for row in metrics_rows(run) if any(name.startswith("val-aux/") for name in row)]


def summarise(row: Mapping[str, float], num_questions: Mapping[str, int]) -> dict[str, float]:
    """Return one validation's means by hops, and over all questions where both are there.

    Args:
        row: Of metrics.csv.
        num_questions: ``one_hop`` and ``two_hop`` to numbers of questions.
    """
    summary: dict[str, float] = {}
    for measure in _MEASURES:
        found = {hops: row[key] for hops, source in _HOPS.items() if (key := f"val-aux/{source}/{measure}/mean") in row}
        summary |= {f"{measure}_{hops}": value for hops, value in found.items()}
        total = sum(num_questions[hops] for hops in found)
        if found and total:
            summary[measure] = sum(value * num_questions[hops] for hops, value in found.items()) / total
    return summary


def summarise_no_tool(row: Mapping[str, float]) -> dict[str, float]:
    """Return exact and contained answers without the tool."""
    prefix = f"val-aux/{DATA_SOURCE_PREFIX}{NO_TOOL_SOURCE}"
    return {measure: row[f"{prefix}/{measure}/mean"] for measure in ("em", "contains")}


def table(stages: Sequence[tuple[str, Mapping[str, float], float | None]], num_questions: int) -> str:
    """Return the stages as a Markdown table.

    Args:
        stages: Name, `summarise`'s numbers, and minutes, of each.
        num_questions: Held-out questions, for the intervals.
    """
    lines = [
        "| policy | EM (95 %) | contained | one-hop | two-hop | format | searches one-hop, two-hop | minutes |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, numbers, minutes in stages:
        low, high = wilson(numbers["em"], num_questions)
        em, contains, one_hop, two_hop, form, searches_one, searches_two = (
            f"{numbers[key]:.3f}" if key in numbers else "-" for key in _COLUMNS
        )
        lines.append(
            f"| {name} | {em} ({low:.3f} to {high:.3f}) | {contains} | {one_hop} | {two_hop} | {form} | "
            f"{searches_one}, {searches_two} | {'-' if minutes is None else f'{minutes:.1f}'} |"
        )
    return "\n".join(lines)


def wilson(share: float, num: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of ``num`` items."""
    z = 1.96
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return middle - half, middle + half
