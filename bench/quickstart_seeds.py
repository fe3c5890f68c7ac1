"""Run the quickstart with several seeds and write what held-out accuracy did, with intervals, as a table and a picture.

Usage: python bench/quickstart_seeds.py --seeds 1 2 3 --runs_dir runs [--report_only]
       python bench/quickstart_seeds.py --overlay configs/algorithms/ppo.yaml --beside quickstart --beside_dir runs
Each seed is the command of ``make quickstart``, with an overlay if one is given, and another ``seed_everything`` and
``data.seed``. Writes docs/results/quickstart.md and .png, or, with an overlay, files named after it. ``--beside`` draws
the rewards beside those of another method's runs. Intervals are 95 %: over items (Wilson) for one seed, and Student's t
over seeds for the mean.
"""

from __future__ import annotations

import argparse
import csv
import math
import subprocess
import sys
import time
from pathlib import Path

from reward_curves import draw_families, mean_and_interval, newest, rewards_of_run

CONFIGS = ["configs/base/trainer_cpu.yaml", "configs/grpo_arithmetic.yaml"]
PREFIX = "val-aux/arithmetic"
SAMPLES_PER_ITERATION = 8 * 16


def run_seed(seed: int, name: str, overlay: Path | None, runs_dir: Path) -> float:
    """Train once; returns wall-clock seconds of the whole command."""
    command = [str(Path(sys.executable).with_name("lit-rl")), "fit"]
    for config in [*CONFIGS, *([str(overlay)] if overlay else [])]:
        command += ["--config", config]
    command += [f"--run_name={name}_seed{seed}", f"--runs_dir={runs_dir}"]
    command += [f"--seed_everything={seed}", f"--data.seed={seed}"]
    started = time.monotonic()
    subprocess.run(command, check=True)
    return time.monotonic() - started


def validations(run: Path) -> list[dict[str, float]]:
    """Rows of metrics.csv that hold a validation, oldest first."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get(f"{PREFIX}/acc/mean")]
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def iteration_seconds(run: Path) -> float:
    """Sum of the iterations' times; of a run that is only read, starting and validating left out."""
    with (run / "metrics.csv").open(newline="") as file:
        return sum(float(row["timing_s/step"]) for row in csv.DictReader(file) if row.get("timing_s/step"))


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share of ``n`` items."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - half, middle + half


def report(seeds: list[int], name: str, runs_dir: Path, num_items: int, seconds: dict[int, float]) -> str:
    """The table, as Markdown."""
    lines = [
        "| seed | before | after (95 % over items) | rise | complete before, after | accuracy among those, after | "
        "time |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    befores, afters = [], []
    for seed in seeds:
        run = newest(runs_dir, name, seed)
        rows = validations(run)
        before, after = rows[0], rows[-1]
        low, high = wilson(after[f"{PREFIX}/acc/mean"], num_items)
        befores.append(before[f"{PREFIX}/acc/mean"])
        afters.append(after[f"{PREFIX}/acc/mean"])
        among = after.get(f"{PREFIX}/acc_if_complete/mean")
        lines.append(
            f"| {seed} | {befores[-1]:.3f} | {afters[-1]:.3f} ({low:.3f} to {high:.3f}) | "
            f"{afters[-1] - befores[-1]:+.3f} | "
            f"{before[f'{PREFIX}/complete/mean']:.3f}, {after[f'{PREFIX}/complete/mean']:.3f} | "
            f"{'-' if among is None else f'{among:.3f}'} | {seconds.get(seed, iteration_seconds(run)) / 60:.1f} min |"
        )
    rises = [after - before for before, after in zip(befores, afters, strict=True)]
    if len(seeds) > 1:
        mean, low, high = mean_and_interval(rises)
        lines.append("")
        lines.append(
            f"Mean rise over {len(seeds)} seeds: {mean:+.3f} (95 % interval over seeds {low:+.3f} to {high:+.3f}); "
            f"{num_items} held-out sums, greedy answers."
        )
    return "\n".join(lines) + "\n"


def draw(seeds: list[int], name: str, runs_dir: Path, target: Path) -> None:
    """Training reward and held-out accuracy of every seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, seed in enumerate(seeds):
        run = newest(runs_dir, name, seed)
        axes.plot(
            *zip(*rewards_of_run(run), strict=True),
            color=f"C{number}",
            alpha=0.5,
            label=f"training reward, seed {seed}",
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
    parser.add_argument("--overlay", type=Path, help="Configuration of a method, over the quickstart's.")
    parser.add_argument("--beside", help="Name of other runs to draw beside these: quickstart, or an overlay's.")
    parser.add_argument("--beside_dir", type=Path, help="Their runs_dir; default: the same.")
    parser.add_argument("--beside_seeds", type=int, nargs="+", help="Their seeds; default: the same.")
    options = parser.parse_args()
    seeds, runs_dir, overlay = options.seeds, options.runs_dir, options.overlay
    name = overlay.stem if overlay else "quickstart"
    seconds = {} if options.report_only else {seed: run_seed(seed, name, overlay, runs_dir) for seed in seeds}
    folder = Path("docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    table = report(seeds, name, runs_dir, num_held_out(), seconds)
    if options.beside:
        sources = {
            name: (runs_dir, seeds),
            options.beside: (options.beside_dir or runs_dir, options.beside_seeds or seeds),
        }
        labels = {"quickstart": "GRPO (quickstart)", "ppo": "PPO with a critic"}
        families = {
            labels.get(key, key): [
                [reward for _, reward in rewards_of_run(newest(source, key, seed))] for seed in own_seeds
            ]
            for key, (source, own_seeds) in sources.items()
        }
        draw_families(families, SAMPLES_PER_ITERATION, folder / f"{name}.png")
    else:
        draw(seeds, name, runs_dir, folder / f"{name}.png")
    (folder / f"{name}.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
