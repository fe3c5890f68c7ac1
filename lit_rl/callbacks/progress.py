"""What a person sees while a run goes on: the iteration and the phase inside it, and one line per finished iteration.

On a terminal a live line follows ``trainer.datamodule.phase`` (see `lit_rl.experience.progress`), which the data
module, the module and WeightSync keep up to date; elsewhere only the lines of finished iterations are printed. It
reads and never writes: a run is the same without it.
"""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from lit_rl.callbacks.iteration_metrics import IterationMetrics, read_iteration, read_validation, scored_version

_PHASE_NAMES = {
    "idle": "waiting",
    "rollout": "rollout",
    "scoring": "scoring",
    "update": "update",
    "weight_sync": "weight sync",
    "validation": "validation",
}
_COUNTED_IN = {"rollout": " trajectories", "validation": " trajectories", "update": " mini-batches"}
_PHASE_SHORT_S = ("rollout", "scoring", "update", "sync")


class RLProgress(Callback):
    """Show the phase inside an iteration live, and a line for each finished iteration.

    Args:
        refresh_per_second: Updates of the live line.
    """

    def __init__(self, refresh_per_second: float = 4.0) -> None:
        self.refresh_per_second = refresh_per_second
        self.console = Console()
        self._live: Live | None = None
        self._started_at = 0.0
        self._iteration_started_at = 0.0
        self._first_iteration = 0
        self._validated = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._started_at = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the live line."""
        self._first_iteration = trainer.current_epoch
        self._iteration_started_at = time.monotonic()
        self._open(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line of the iteration before: only now has everything of it been logged."""
        if trainer.current_epoch > self._first_iteration:
            self._print_iteration(trainer, trainer.current_epoch - 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last iteration's line and end the live line."""
        # current_epoch counts finished iterations here; a run stopped before its first has none to show.
        if trainer.current_epoch > self._first_iteration:
            self._print_iteration(trainer, trainer.current_epoch - 1)
        self._close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where everything is."""
        if trainer.is_global_zero:
            minutes, seconds = divmod(round(time.monotonic() - self._started_at), 60)
            count = trainer.current_epoch - self._first_iteration
            print(
                f"Done: {count} iterations in {minutes} min {seconds} s. Metrics, checkpoints and what else was "
                f"recorded are in {trainer.default_root_dir}",
                flush=True,
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the live line, outside of fit."""
        self._open(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that the iteration has a validation, or print one before training; outside of fit, end the live line."""
        version = scored_version(pl_module)
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated = version > trainer.current_epoch
            if not self._validated:
                scores = validation_text(read_validation(trainer.callback_metrics))
                self._print(trainer, f"before iteration {version:d}  {scores}")
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            self._close()

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the live line."""
        self._open(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the live line."""
        self._close()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the live line."""
        self._open(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the live line."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._close()

    def _open(self, trainer: Trainer) -> None:
        if self._live is not None or not trainer.is_global_zero or not self.console.is_terminal:
            return
        self._live = Live(
            console=self.console,
            get_renderable=lambda: live_line(trainer, time.monotonic()),
            refresh_per_second=self.refresh_per_second,
            transient=True,
        )
        self._live.start()

    def _close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _print_iteration(self, trainer: Trainer, iteration: int) -> None:
        validated, self._validated = self._validated, False
        metrics = read_iteration(iteration, trainer.callback_metrics, validated=validated)
        now = time.monotonic()
        metrics.seconds.setdefault("total", now - self._iteration_started_at)
        self._iteration_started_at = now
        self._print(trainer, iteration_line(metrics))

    def _print(self, trainer: Trainer, line: str) -> None:
        if not trainer.is_global_zero:
            return
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
        else:
            print(line, flush=True)


def live_line(trainer: Trainer, now: float) -> Text:
    """The line that follows the phase, such as ``iteration 2 (3 of 30)  rollout 37/64 trajectories  412 tok/s  9 s``.

    Args:
        trainer: Holds the iteration and ``datamodule.phase``.
        now: `time.monotonic`, in seconds.
    """
    phase: Any = trainer.datamodule.phase  # type: ignore[attr-defined]
    parts = []
    if trainer.state.fn == "fit":
        total = trainer.max_epochs
        # After the last iteration the counter stands one past it.
        index = min(trainer.current_epoch, total - 1) if total and total > 0 else trainer.current_epoch
        parts.append(f"iteration {index}" + (f" ({index + 1} of {total})" if total and total > 0 else ""))
    name = _PHASE_NAMES[phase.phase]
    parts.append(f"{name} {phase.done}/{phase.total}{_COUNTED_IN.get(phase.phase, '')}" if phase.total else name)
    elapsed_s = now - phase.started_at
    if phase.tokens and elapsed_s > 0:
        parts.append(f"{phase.tokens / elapsed_s:.0f} tok/s")
    if phase.phase != "idle":
        parts.append(f"{elapsed_s:.0f} s")
    return Text("  ".join(parts), no_wrap=True, overflow="ellipsis")


def iteration_line(metrics: IterationMetrics) -> str:
    """One finished iteration as a line of fixed columns.

    Args:
        metrics: Its numbers; what is ``None`` or missing is left out.
    """
    parts = [f"iteration {metrics.iteration:4d}"]
    if metrics.loss is not None:
        parts.append(f"loss {metrics.loss:7.4f}")
    if metrics.reward is not None:
        parts.append(f"reward {metrics.reward:6.3f}")
    if metrics.response_length is not None:
        parts.append(f"response {metrics.response_length:6.1f} tokens")
    timed = [f"{phase} {metrics.seconds[phase]:.1f}" for phase in _PHASE_SHORT_S if phase in metrics.seconds]
    if timed or "total" in metrics.seconds:
        total = f"{metrics.seconds['total']:.1f} s" if "total" in metrics.seconds else "s"
        parts.append(f"{total} ({', '.join(timed)})" if timed else total)
    if metrics.validation_reward:
        parts.append(validation_text(metrics.validation_reward))
    if metrics.validation_loss is not None:
        accuracy = metrics.validation_accuracy or 0.0
        parts.append(f"validation loss {metrics.validation_loss:.4f}, accuracy {accuracy:.3f}")
    return "  ".join(parts)


def validation_text(rewards: dict[str, float]) -> str:
    """Mean rewards of a validation, each with its data source's name where there are several.

    Args:
        rewards: By data source.
    """
    several = len(rewards) > 1
    named = [f"{source} {value:.3f}" if several else f"{value:.3f}" for source, value in rewards.items()]
    return f"validation {', '.join(named)}"
