"""``reward.png``: training and validation reward over iterations, and the response length below.

The points are part of the checkpoint, so the curve of a resumed run begins where the first run began. Drawn without
pyplot: no global backend is chosen and no window opens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_rl.callbacks.iteration_metrics import read_iteration, read_validation, scored_version

PLOT_FILE = "reward.png"


class RewardPlot(Callback):
    """Draw the curves every few iterations and at the end.

    Args:
        every_n_iterations: Iterations between drawings (about 0.3 s each on one core), at least 1.
    """

    def __init__(self, every_n_iterations: int = 5) -> None:
        if every_n_iterations < 1:
            raise ValueError(f"RewardPlot.every_n_iterations={every_n_iterations} must be at least 1.")
        self.every_n_iterations = every_n_iterations
        self._train: list[tuple[int, float]] = []
        self._length: list[tuple[int, float]] = []
        self._validation: dict[str, list[tuple[int, float]]] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the validation's numbers; a sanity check leaves no point."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return
        for source, value in read_validation(trainer.callback_metrics).items():
            self._validation.setdefault(source, []).append((scored_version(pl_module), value))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the iteration's numbers, and draw now and then."""
        iteration = trainer.current_epoch
        metrics = read_iteration(iteration, trainer.callback_metrics, validated=False)
        if metrics.reward is not None:
            self._train.append((iteration, metrics.reward))
        if metrics.response_length is not None:
            self._length.append((iteration, metrics.response_length))
        if (iteration + 1) % self.every_n_iterations == 0:
            self.draw(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the whole run."""
        self.draw(trainer)

    def draw(self, trainer: Trainer) -> None:
        """Write ``reward.png`` into the run folder, on rank 0.

        Args:
            trainer: Its ``default_root_dir`` is the run folder.
        """
        if not trainer.is_global_zero or not self._train:
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 6), layout="constrained")
        FigureCanvasAgg(figure)
        reward, length = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
        reward.plot(*zip(*self._train, strict=True), label="training")
        for source, points in self._validation.items():
            reward.plot(*zip(*points, strict=True), marker="o", linestyle="--", label=f"validation: {source}")
        reward.set_ylabel("mean reward")
        reward.legend()
        reward.grid(alpha=0.3)
        if self._length:
            length.plot(*zip(*self._length, strict=True))
        length.set_ylabel("response tokens")
        length.set_xlabel("iteration")
        length.grid(alpha=0.3)
        target = Path(trainer.default_root_dir) / PLOT_FILE
        aside = target.with_name(f"{PLOT_FILE}.partial")
        # A viewer that has the picture open never sees half of one.
        figure.savefig(aside, format="png", dpi=110)
        os.replace(aside, target)

    def state_dict(self) -> dict[str, Any]:
        """The points so far."""
        return {"train": self._train, "length": self._length, "validation": self._validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from the points of the run that is resumed.

        Args:
            state_dict: From the checkpoint.
        """
        self._train, self._length = list(state_dict["train"]), list(state_dict["length"])
        self._validation = {source: list(points) for source, points in state_dict["validation"].items()}
