"""Say which rows come next, in an order that follows from a seed and can be taken up again anywhere.

Position in the flow: prompt source -> **prompt cursor** -> collector. The order of epoch ``e`` is a function of (seed,
e) alone: no global random state, no worker, batch size or earlier call has a part in it, so its state is two whole
numbers.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

from lit_rl.data.prompt_rows import PromptSource


class PromptCursor:
    """Walks over the rows of a source, epoch after epoch.

    Args:
        num_rows: Rows of the source, at least 1.
        seed: Of the shuffling.
        shuffle: Whether each epoch has an order of its own; else rows come by index.
        fingerprint: Stands for the content of the source (see `fingerprint`); a state with another one is refused.

    Raises:
        ValueError: If there are no rows.
    """

    def __init__(self, num_rows: int, *, seed: int = 0, shuffle: bool = True, fingerprint: str = "") -> None:
        if num_rows < 1:
            raise ValueError(f"PromptCursor: num_rows={num_rows}; the prompt source has no rows.")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.epoch = 0
        self.position = 0
        self._order = self._order_of(0)

    @classmethod
    def for_source(cls, source: PromptSource, *, seed: int = 0, shuffle: bool = True) -> PromptCursor:
        """Return a cursor that knows the content of its source."""
        return cls(len(source), seed=seed, shuffle=shuffle, fingerprint=fingerprint(source))

    def next(self, num: int) -> list[int]:
        """Return the next row indices and move past them, over the ends of epochs; ``num`` may exceed the rows."""
        if num < 0:
            raise ValueError(f"PromptCursor.next: num={num} must not be negative.")
        indices: list[int] = []
        while len(indices) < num:
            taken = self._order[self.position : self.position + num - len(indices)]
            indices += taken
            self.position += len(taken)
            if self.position == self.num_rows:
                self.epoch += 1
                self.position = 0
                self._order = self._order_of(self.epoch)
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and position as whole numbers, and what they are good for."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the walk where the state was taken.

        Raises:
            ValueError: If the state belongs to other rows or another order.
        """
        own = self.state_dict()
        changed = [key for key in ("num_rows", "seed", "shuffle", "fingerprint") if state[key] != own[key]]
        if changed:
            differences = ", ".join(f"{key} was {state[key]!r} and is {own[key]!r}" for key in changed)
            raise ValueError(
                f"The checkpoint's place in the prompts belongs to other prompts or another order: {differences}. "
                "Resume with the same data settings and files, or start a new run from the checkpoint's weights."
            )
        self.epoch = int(state["epoch"])
        self.position = int(state["position"])
        self._order = self._order_of(self.epoch)

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            # A text seed goes through SHA-512, so neighbouring seeds and epochs have unrelated orders.
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


def fingerprint(source: PromptSource) -> str:
    """Return a hash of all row ids of a source in their order, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for index in range(len(source)):
        digest.update(source[index].row_id.encode() + b"\0")
    return digest.hexdigest()
