"""Read mean rewards of runs, and draw families of runs as mean and interval over their seeds."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path

T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's t for n - 1 degrees of freedom, by n."""


def newest(runs_dir: Path, name: str, seed: int) -> Path:
    """Folder of the newest run of a seed."""
    return max((runs_dir / f"{name}_seed{seed}").iterdir(), key=lambda path: path.stat().st_mtime)


def rewards_of_run(run: Path) -> list[tuple[float, float]]:
    """Iteration and mean training reward, from lit_rl's metrics.csv."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["critic/score/mean"]]
    return [(float(row["step"]), float(row["critic/score/mean"])) for row in rows]


def mean_and_interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the ends of its 95 % interval (Student's t); the mean three times for one value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, mean, mean
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Mean of each value and up to ``width - 1`` before it."""
    return [statistics.mean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def draw_families(families: dict[str, list[list[float]]], samples_per_iteration: int, target: Path) -> None:
    """Draw mean reward against sampled answers: thin lines are seeds, bands 95 % intervals of the mean over them.

    Args:
        families: By name, each seed's mean reward per iteration.
        samples_per_iteration: Answers sampled in one.
        target: A PNG.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, (name, curves) in enumerate(families.items()):
        smoothed = [smooth(curve) for curve in curves]
        samples = [samples_per_iteration * (i + 1) for i in range(min(map(len, curves)))]
        bands = [mean_and_interval([curve[i] for curve in smoothed]) for i in range(len(samples))]
        color = f"C{number}"
        for curve in smoothed:
            axes.plot(samples, curve[: len(samples)], color=color, alpha=0.3, linewidth=0.8)
        label = f"{name}, mean of {len(curves)} seeds" if len(curves) > 1 else f"{name}, one seed"
        axes.plot(samples, [band[0] for band in bands], color=color, label=label)
        axes.fill_between(
            samples, [band[1] for band in bands], [band[2] for band in bands], color=color, alpha=0.15, linewidth=0
        )
    axes.set_xlabel("sampled answers")
    axes.set_ylabel("mean reward, running mean of 5 iterations")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(target, dpi=110)
