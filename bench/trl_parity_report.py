"""Compare the runs of TRL's GRPOTrainer with lit_rl's on the same tasks: a picture and a table each.

Usage: python bench/trl_parity_report.py --runs_dir runs --trl_dir /tmp/trl_runs [--lit_seeds 1 2 3] [--trl_seeds 1 2 3]
       python bench/trl_parity_report.py --bandit_dir /tmp/trl_bandit
``runs_dir`` is that of bench/quickstart_seeds.py, ``trl_dir`` the ``--out`` of bench/trl_parity/trl_grpo.py: writes
docs/results/trl_parity_smollm2.png and .md. Curves are cut to the iterations that every run has. ``bandit_dir`` is the
``--out`` of bench/trl_parity/lit_bandit.py: writes docs/results/trl_parity_bandit.png and .md.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from quickstart_seeds import PREFIX, SAMPLES_PER_ITERATION, validations
from reward_curves import draw_families, mean_and_interval, newest, rewards_of_run, smooth


def column(path: Path, name: str) -> list[float]:
    """One column of a CSV file."""
    with path.open(newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def show(values: list[float]) -> str:
    """Mean with its interval over seeds, where there is more than one."""
    mean, low, high = mean_and_interval(values)
    return f"{mean:.3f}" if len(values) < 2 else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def table(families: dict[str, list[list[float]]], held_out: dict[str, list[tuple[float, float]]]) -> str:
    """Rewards at the start, the middle and the end of what all runs have, and held-out accuracy where there is one."""
    length = len(next(iter(families.values()))[0])
    windows = [(start, min(start + 5, length)) for start in (0, max(0, length // 2 - 2), max(0, length - 5))]
    names = [f"reward, iterations {start} to {end - 1}" for start, end in windows]
    names += ["held-out before", "held-out after"] if held_out else []
    lines = [f"| trainer | seeds | {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for name, curves in families.items():
        cells = [show([sum(curve[start:end]) / (end - start) for curve in curves]) for start, end in windows]
        for column_of_pair in range(2 if held_out else 0):
            accuracies = [pair[column_of_pair] for pair in held_out[name]]
            cells.append(show(accuracies) if accuracies else "-")
        lines.append(f"| {name} | {len(curves)} | {' | '.join(cells)} |")
    if all(len(curves) > 1 for curves in families.values()):
        bands = [
            [mean_and_interval([smooth(curve)[i] for curve in curves]) for i in range(length)]
            for curves in families.values()
        ]
        overlaps = sum(max(a[1], b[1]) <= min(a[2], b[2]) for a, b in zip(*bands, strict=True))
        lines += ["", f"95 % intervals over seeds (running means of 5) overlap at {overlaps} of {length} iterations."]
    return "\n".join(lines) + "\n"


def compare_smollm2(runs_dir: Path, trl_dir: Path, lit_seeds: list[int], trl_seeds: list[int]) -> None:
    """The quickstart's task."""
    runs = [newest(runs_dir, "quickstart", seed) for seed in lit_seeds]
    lit_rl_curves = [[reward for _, reward in rewards_of_run(run)] for run in runs]
    trl_curves = [column(trl_dir / f"trl_seed{seed}.csv", "reward") for seed in trl_seeds]
    length = min(map(len, lit_rl_curves + trl_curves))
    families = {
        "lit_rl GRPO": [curve[:length] for curve in lit_rl_curves],
        "TRL GRPOTrainer": [curve[:length] for curve in trl_curves],
    }
    key = f"{PREFIX}/acc/mean"
    results = [json.loads((trl_dir / f"trl_seed{seed}.json").read_text()) for seed in trl_seeds]
    held_out = {
        "lit_rl GRPO": [(rows[0][key], rows[-1][key]) for rows in map(validations, runs)],
        "TRL GRPOTrainer": [(result["before"], result["after"]) for result in results if "after" in result],
    }
    seconds = sorted(second for seed in trl_seeds for second in column(trl_dir / f"trl_seed{seed}.csv", "seconds"))
    text = table(families, held_out) + f"\nTRL took {seconds[len(seconds) // 2]:.0f} s per iteration (median).\n"
    write("trl_parity_smollm2", families, SAMPLES_PER_ITERATION, text)


def compare_bandit(folder: Path, lit_seeds: list[int], trl_seeds: list[int]) -> None:
    """The contextual bandit of the tests."""
    families = {
        "lit_rl GRPO": [column(folder / f"lit_bandit_seed{seed}.csv", "reward") for seed in lit_seeds],
        "TRL GRPOTrainer": [column(folder / f"trl_bandit_seed{seed}.csv", "reward") for seed in trl_seeds],
    }
    write("trl_parity_bandit", families, 4 * 8, table(families, {}))


def write(name: str, families: dict[str, list[list[float]]], samples_per_iteration: int, text: str) -> None:
    """Both files, and the table on the screen."""
    folder = Path("docs/results")
    draw_families(families, samples_per_iteration, folder / f"{name}.png")
    (folder / f"{name}.md").write_text(text)
    print(text)


def main() -> None:
    """Read the runs and write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs_dir", type=Path)
    parser.add_argument("--trl_dir", type=Path)
    parser.add_argument("--bandit_dir", type=Path)
    parser.add_argument("--lit_seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--trl_seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    if options.runs_dir and options.trl_dir:
        compare_smollm2(options.runs_dir, options.trl_dir, options.lit_seeds, options.trl_seeds)
    if options.bandit_dir:
        compare_bandit(options.bandit_dir, options.lit_seeds, options.trl_seeds)


if __name__ == "__main__":
    main()
