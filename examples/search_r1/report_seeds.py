"""Put several seeds of the recipe into one table and one picture.

Run: python examples/search_r1/report_seeds.py runs/search_r1/one_hop_seed* --out docs/results/search_r1

Reads results.json and the metrics of each work folder; writes OUT.md and OUT.png: reward, searches per training
conversation, and held-out exact match. Intervals are 95 %, Student's t over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import results

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's t for n - 1 degrees of freedom, by n."""
_SHOWN = ("em", "em_one_hop", "em_two_hop", "format", "searches_one_hop", "searches_two_hop")
_CURVES = (
    ("reward per conversation", "critic/score/mean"),
    ("exact match, training", "reward/em/mean"),
    ("searches per conversation", "reward/searches/mean"),
)


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds and half of its interval; 0 for one seed."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    t = T_95.get(len(values), 2.0)
    return mean, t * statistics.stdev(values) / math.sqrt(len(values))


def table(summaries: Sequence[dict]) -> str:
    """Return means over seeds of every stage, as Markdown.

    Args:
        summaries: The ``results.json`` of each seed.
    """
    lines = [f"| policy, {len(summaries)} seeds | {' | '.join(_SHOWN)} |", f"| --- |{' --- |' * len(_SHOWN)}"]
    for stage in summaries[0]["stages"]:
        cells = []
        for name in _SHOWN:
            values = [summary["stages"][stage][name] for summary in summaries if name in summary["stages"][stage]]
            mean, half = mean_and_half(values) if values else (math.nan, 0.0)
            cells.append("-" if not values else f"{mean:.3f}" if half == 0 else f"{mean:.3f} +- {half:.3f}")
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    minutes = [summary["minutes"]["rl"] for summary in summaries]
    totals = [summary["total"] for summary in summaries]
    lines.append("")
    lines.append(
        f"Reinforcement learning took {min(minutes):.1f} to {max(minutes):.1f} minutes with its evaluations, "
        f"everything {min(totals):.1f} to {max(totals):.1f}."
    )
    return "\n".join(lines)


def plot(folders: Sequence[Path], path: Path) -> None:
    """Draw the training curves of each seed, with held-out exact match as dots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_CURVES), figsize=(4 * len(_CURVES), 3.2), layout="constrained")
    for number, folder in enumerate(folders):
        rows = results.metrics_rows(results.newest_run(folder / "runs", "rl"))
        questions = json.loads((folder / "results.json").read_text())["num_questions"]
        for axis, (title, key) in zip(axes, _CURVES, strict=True):
            points = [(row["step"], row[key]) for row in rows if key in row]
            axis.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.7, label=folder.name)
            axis.set(title=title, xlabel="iteration")
            axis.grid(alpha=0.3)
        held_out = [(row["step"], results.summarise(row, questions).get("em")) for row in rows]
        dots = [(step, em) for step, em in held_out if em is not None]
        axes[1].plot(*zip(*dots, strict=True), "o--", color=f"C{number}")
    axes[1].set_title("exact match: training, and held out (dots)")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def main() -> None:
    """Write table and picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work_dirs", type=Path, nargs="+", help="work folders of run.py, one per seed")
    parser.add_argument("--out", type=Path, default=Path("docs/results/search_r1"))
    options = parser.parse_args()
    missing = [str(folder) for folder in options.work_dirs if not (folder / "results.json").exists()]
    if missing:
        raise SystemExit(f"report_seeds: error: no results.json in {', '.join(missing)}: these runs are not complete.")
    text = table([json.loads((folder / "results.json").read_text()) for folder in options.work_dirs])
    options.out.with_suffix(".md").write_text(text + "\n")
    plot(options.work_dirs, options.out.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
