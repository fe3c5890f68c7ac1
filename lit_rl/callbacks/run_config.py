"""Send the resolved configuration of a run to Weights & Biases, once and nested.

Lightning's own hyper-parameter logging flattens it, leaves out the Trainer's part, or sends it twice. Other loggers
have the run folder's ``config.yaml``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, WandbLogger


class LogRunConfig(Callback):
    """Update the wandb run's ``config`` when the run is set up.

    Args:
        config: The whole configuration as nested plain values.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Send it from rank 0."""
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                # A resumed wandb run already has values; those of this run are the ones it uses.
                logger.experiment.config.update(self.config, allow_val_change=True)


def keep_wandb_files_in(run_folder: Path, loggers: Iterable[Logger]) -> None:
    """Have wandb write into the run folder unless a ``save_dir`` is configured.

    Args:
        run_folder: Folder of the run.
        loggers: Of the Trainer, none of them used yet.
    """
    for logger in loggers:
        # The default is the current folder. Read when the wandb run is made, at its first use (Lightning 2.6).
        if isinstance(logger, WandbLogger) and logger.save_dir in (None, "."):
            logger._wandb_init["dir"] = logger._save_dir = str(run_folder)
