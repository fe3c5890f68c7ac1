"""Let every method learn the contextual bandit of the tests, three seeds each: a picture and a table.

Usage: python bench/learning_curves.py [names of overlays]
Writes docs/results/learning_curves.png (all methods only) and prints the table of docs/algorithms.md.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEEDS = range(3)
COLUMNS = 6


def draw(curves: dict[str, list[list[float]]], target: Path) -> None:
    """One small picture per method: each seed's mean reward over iterations."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(1.6 * COLUMNS, 1.3 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(num_rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, (name, seeds) in zip(grid.flat, curves.items(), strict=False):
        for rewards in seeds:
            axes.plot(rewards, linewidth=0.8)
        axes.set_title(name, fontsize=6.5)
        axes.set_ylim(0, 1.05)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=6)
    figure.supxlabel("iteration", fontsize=7)
    figure.supylabel("mean reward (chance 0.25)", fontsize=7)
    figure.savefig(target, dpi=90)


def main() -> None:
    """Train, print, draw."""
    sys.path.insert(0, str(ROOT / "tests/integration"))
    import torch
    from bandit import save_tiny_model
    from test_learning import CONFIGS, final_reward, learning_curve

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or [path.stem for path in CONFIGS]
    folder = save_tiny_model(Path(tempfile.mkdtemp()))
    curves = {}
    for path in CONFIGS:
        if path.stem in wanted:
            curves[path.stem] = [learning_curve(path, folder, seed) for seed in SEEDS]
            finals = " | ".join(f"{final_reward(rewards):.2f}" for rewards in curves[path.stem])
            print(f"| `{path.stem}` | {finals} |", flush=True)
    if len(curves) == len(CONFIGS):
        draw(curves, ROOT / "docs/results/learning_curves.png")


if __name__ == "__main__":
    main()
