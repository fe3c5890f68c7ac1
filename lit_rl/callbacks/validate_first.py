"""Validate once before the first iteration, so that a curve starts where the untrained policy stands.

Lightning's sanity check logs nothing; this is a validation like any other, logged as policy version 0. A resumed run
has had its own and gets none.
"""

from __future__ import annotations

import lightning as L
from lightning.pytorch.callbacks import Callback


class ValidateFirst(Callback):
    """Run the validation loop when training starts. List it after WeightSync."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Validate, unless the run was resumed."""
        if trainer.current_epoch > 0:
            return
        # The stage decides which loop logs, and must be training again for the first iteration.
        trainer.validating = True
        try:
            trainer.fit_loop.epoch_loop.val_loop.run()
        finally:
            trainer.training = True
