"""What the run is doing right now, for whoever wants to show it.

Collector, module and weight sync write, the progress display reads from another thread: single attribute writes, no
locks.
"""

from __future__ import annotations

import time


class PhaseProgress:
    """The current phase and how far it is.

    Attributes:
        phase: ``idle``, ``rollout``, ``scoring``, ``update``, ``weight_sync`` or ``validation``.
        done: Units finished: trajectories in a rollout or validation, mini-batches in an update.
        total: Units in all; 0 where unknown.
        tokens: Tokens sampled so far in this phase.
        started_at: ``time.monotonic()`` at its start, in seconds.
    """

    def __init__(self) -> None:
        self.phase = "idle"
        self.done = 0
        self.total = 0
        self.tokens = 0
        self.started_at = time.monotonic()

    def start(self, phase: str, total: int = 0) -> None:
        """Enter a phase."""
        self.done, self.total, self.tokens = 0, total, 0
        self.started_at = time.monotonic()
        self.phase = phase

    def advance(self, done: int = 1, tokens: int = 0) -> None:
        """Count finished units and the tokens they brought."""
        self.done += done
        self.tokens += tokens

    @property
    def elapsed_s(self) -> float:
        """Seconds in this phase."""
        return time.monotonic() - self.started_at
