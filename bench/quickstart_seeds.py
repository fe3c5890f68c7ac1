"""Run the quickstart with several seeds and write what held-out accuracy did, with intervals, as a table and a picture.

Usage: python bench/quickstart_seeds.py --seeds 1 2 3 --runs_dir runs [--report_only]
Each seed is the command of ``make quickstart`` with another ``seed_everything`` and ``data.seed``. Writes
docs/results/quickstart.md and docs/results/quickstart.png. Intervals are 95 %: over items (Wilson) for one seed, and
Student's t over seeds for the mean.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

CONFIGS = ["configs/base/trainer_cpu.yaml", "configs/grpo_arithmetic.yaml"]
PREFIX = "val-aux/arithmetic"
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Quantiles of Student's t for n - 1 degrees of freedom, by n."""


def run_seed(seed: int, runs_dir: Path) -> float:
    """Train once; returns wall-clock seconds of the whole command."""
    command = [str(Path(sys.executable).with_name("lit-rl")), "fit"]
    for config in CONFIGS:
        command += ["--config", config]
    command += [f"--run_name=quickstart_seed{seed}", f"--runs_dir={runs_dir}"]
    command += [f"--seed_everything={seed}", f"--data.seed={seed}"]
    started = time.monotonic()
    subprocess.run(command, check=True)
    return time.monotonic() - started


def newest(runs_dir: Path, seed: int) -> Path:
    """Folder of the seed's newest run."""
    return max((runs_dir / f"quickstart_seed{seed}").iterdir(), key=lambda path: path.stat().st_mtime)


def validations(run: Path) -> list[dict[str, float]]:
    """Rows of metrics.csv that hold a validation, oldest first."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(f"{PREFIX}/acc/mean")]
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def rewards(run: Path) -> list[tuple[float, float]]:
    """Iteration and mean training reward."""
    with (run / "metrics.csv").open(newline="") as file:
        return [
            (float(r["step"]), float(r["critic/score/mean"])) for r in csv.DictReader(file) if r["critic/score/mean"]
        ]


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of ``n`` items."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - half, middle + half


def report(seeds: list[int], runs_dir: Path, folder: Path, num_items: int, seconds: dict[int, float]) -> str:
    """The table, as Markdown."""
    lines = [
        "| seed | before | after (95 % over items) | rise | complete before, after | accuracy among those, after | "
        "time |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    befores, afters = [], []
    for seed in seeds:
        rows = validations(newest(runs_dir, seed))
        before, after = rows[0], rows[-1]
        low, high = wilson(after[f"{PREFIX}/acc/mean"], num_items)
        befores.append(before[f"{PREFIX}/acc/mean"])
        afters.append(after[f"{PREFIX}/acc/mean"])
        among = after.get(f"{PREFIX}/acc_if_complete/mean")
        lines.append(
            f"| {seed} | {befores[-1]:.3f} | {afters[-1]:.3f} ({low:.3f} to {high:.3f}) | "
            f"{afters[-1] - befores[-1]:+.3f} | "
            f"{before[f'{PREFIX}/complete/mean']:.3f}, {after[f'{PREFIX}/complete/mean']:.3f} | "
            f"{'-' if among is None else f'{among:.3f}'} | {seconds.get(seed, float('nan')) / 60:.1f} min |"
        )
    rises = [after - before for before, after in zip(befores, afters, strict=True)]
    if len(seeds) > 1:
        half = T_95[len(seeds)] * statistics.stdev(rises) / math.sqrt(len(rises))
        lines.append("")
        lines.append(
            f"Mean rise over {len(seeds)} seeds: {statistics.mean(rises):+.3f} "
            f"(95 % interval over seeds {statistics.mean(rises) - half:+.3f} to {statistics.mean(rises) + half:+.3f}); "
            f"{num_items} held-out sums, greedy answers."
        )
    draw(seeds, runs_dir, folder / "quickstart.png")
    return "\n".join(lines) + "\n"


def draw(seeds: list[int], runs_dir: Path, target: Path) -> None:
    """Training reward and held-out accuracy of every seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, seed in enumerate(seeds):
        run = newest(runs_dir, seed)
        axes.plot(
            *zip(*rewards(run), strict=True), color=f"C{number}", alpha=0.5, label=f"training reward, seed {seed}"
        )
        points = [(row["step"], row[f"{PREFIX}/acc/mean"]) for row in validations(run)]
        axes.plot(
            *zip(*points, strict=True), color=f"C{number}", marker="o", linestyle="--", label=f"held-out, seed {seed}"
        )
    axes.set_xlabel("iteration")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(target, dpi=110)


def num_held_out() -> int:
    """Held-out sums of the recipe; none of their pairs is in the training split."""
    from lit_rl.data import Arithmetic

    train, val = Arithmetic(split="train", max_operand=50), Arithmetic(split="val", max_operand=50)
    shared = {tuple(sorted(pair)) for pair in train.pairs()} & {tuple(sorted(pair)) for pair in val.pairs()}
    assert not shared, f"{len(shared)} pairs are in both splits"
    return len(val)


def main() -> None:
    """Run the seeds one after the other, then report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs_dir", type=Path, default=Path("runs"))
    parser.add_argument("--report_only", action="store_true", help="Only read runs that are there.")
    options = parser.parse_args()
    seconds = {} if options.report_only else {seed: run_seed(seed, options.runs_dir) for seed in options.seeds}
    folder = Path("docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    table = report(options.seeds, options.runs_dir, folder, num_held_out(), seconds)
    (folder / "quickstart.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
