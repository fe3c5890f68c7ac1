"""Compare the runs of TRL's GRPOTrainer with lit_rl's on the same task: a picture and a table.

Usage: python bench/trl_parity_report.py --runs_dir runs --trl_dir /tmp/trl_runs [--lit_seeds 1 2 3] [--trl_seeds 1 2 3]
``runs_dir`` is that of bench/quickstart_seeds.py, ``trl_dir`` the ``--out`` of bench/trl_parity/trl_grpo.py. Writes
docs/results/trl_parity.png and docs/results/trl_parity.md. Curves are cut to the iterations that every run has.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from quickstart_seeds import PREFIX, SAMPLES_PER_ITERATION, validations
from reward_curves import draw_families, mean_and_interval, newest, rewards_of_run, smooth


def trl_curve(folder: Path, seed: int) -> tuple[list[float], list[float]]:
    """Mean reward and seconds of each iteration of a seed."""
    with (folder / f"trl_seed{seed}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["reward"]) for row in rows], [float(row["seconds"]) for row in rows]


def show(values: list[float]) -> str:
    """Mean with its interval over seeds, where there is more than one."""
    mean, low, high = mean_and_interval(values)
    return f"{mean:.3f}" if len(values) < 2 else f"{mean:.3f} ({low:.3f} to {high:.3f})"


def table(families: dict[str, list[list[float]]], held_out: dict[str, list[tuple[float, float]]]) -> str:
    """Rewards at the start, the middle and the end of what all runs have, and held-out accuracy."""
    length = len(next(iter(families.values()))[0])
    windows = [(start, min(start + 5, length)) for start in (0, max(0, length // 2 - 2), max(0, length - 5))]
    names = " | ".join(f"reward, iterations {start} to {end - 1}" for start, end in windows)
    lines = [f"| trainer | seeds | {names} | held-out before | held-out after |", "| --- " * 7 + "|"]
    for name, curves in families.items():
        cells = [show([sum(curve[start:end]) / (end - start) for curve in curves]) for start, end in windows]
        before = [first for first, _ in held_out[name]]
        after = [last for _, last in held_out[name]]
        accuracies = [show(before) if before else "-", show(after) if after else "-"]
        lines.append(f"| {name} | {len(curves)} | {' | '.join([*cells, *accuracies])} |")
    if all(len(curves) > 1 for curves in families.values()):
        bands = [
            [mean_and_interval([smooth(curve)[i] for curve in curves]) for i in range(length)]
            for curves in families.values()
        ]
        overlaps = sum(max(a[1], b[1]) <= min(a[2], b[2]) for a, b in zip(*bands, strict=True))
        lines += [
            "",
            f"The 95 % intervals over seeds (running means of 5) overlap at {overlaps} of {length} iterations.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the runs and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs_dir", type=Path, required=True)
    parser.add_argument("--trl_dir", type=Path, required=True)
    parser.add_argument("--lit_seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--trl_seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    runs = [newest(options.runs_dir, "quickstart", seed) for seed in options.lit_seeds]
    lit_rl_curves = [[reward for _, reward in rewards_of_run(run)] for run in runs]
    trl_curves = [trl_curve(options.trl_dir, seed)[0] for seed in options.trl_seeds]
    length = min(map(len, lit_rl_curves + trl_curves))
    families = {
        "lit_rl GRPO": [curve[:length] for curve in lit_rl_curves],
        "TRL GRPOTrainer": [curve[:length] for curve in trl_curves],
    }
    key = f"{PREFIX}/acc/mean"
    rows_of_runs = [validations(run) for run in runs]
    results = [json.loads((options.trl_dir / f"trl_seed{seed}.json").read_text()) for seed in options.trl_seeds]
    held_out = {
        "lit_rl GRPO": [(rows[0][key], rows[-1][key]) for rows in rows_of_runs],
        "TRL GRPOTrainer": [(result["before"], result["after"]) for result in results if "after" in result],
    }
    seconds = sorted(second for seed in options.trl_seeds for second in trl_curve(options.trl_dir, seed)[1])
    text = table(families, held_out)
    text += f"\nTRL took {seconds[len(seconds) // 2]:.0f} s per iteration (median).\n"
    folder = Path("docs/results")
    draw_families(families, SAMPLES_PER_ITERATION, folder / "trl_parity.png")
    (folder / "trl_parity.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
