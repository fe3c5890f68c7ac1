"""What every data module of a run has: its place in the training rows, kept in checkpoints, and what it is doing.

Position in the flow: base of `RolloutDataModule` and `SFTDataModule`. It knows no rows and no engine.
"""

from __future__ import annotations

from typing import Any

import lightning as L

from lit_rl.data import PromptCursor
from lit_rl.experience.batch import MiniBatch
from lit_rl.experience.progress import PhaseProgress


class RunDataModule(L.LightningDataModule):
    """Base of the classes that ``--data`` may name.

    Attributes:
        batch_class: What its training batches are; a module that learns from others is refused.
        phase: What the run is doing, for the display.
    """

    batch_class: type = MiniBatch

    def __init__(self) -> None:
        super().__init__()
        self.phase = PhaseProgress()
        self._cursor: PromptCursor | None = None

    def state_dict(self) -> dict[str, Any]:
        """The cursor over the training rows, which rank 0 has and writes."""
        return {} if self._cursor is None else {"cursor": self._cursor.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was."""
        if self._cursor is not None and "cursor" in state_dict:
            self._cursor.load_state_dict(state_dict["cursor"])
