"""What a rank does when rank 0, which owns the rollout side, is gone."""

from __future__ import annotations

import time

from lit_rl.cluster import ProcessIdentity

_RANK_0_ENDS_S = 60.0


class RankZeroLost(RuntimeError):
    """Rank 0 has ended, or stopped answering, while this rank waited for it."""


def rank_zero_lost(what: str, rank: int, rank_zero: ProcessIdentity, cause: object) -> RankZeroLost:
    """Return the error for a rank whose rank 0 has gone, once rank 0 has had the time to say why."""
    wait_for_end(rank_zero)
    return RankZeroLost(f"Rank 0 ended while rank {rank} waited for {what}: its own error says why ({cause}).")


def wait_for_end(rank_zero: ProcessIdentity) -> None:
    """Wait, for a minute at most, until rank 0 has ended; not for one on another machine.

    Lightning's launcher kills rank 0 as soon as another rank ends with an error (2.6), whatever rank 0 is cleaning up.
    """
    deadline = time.monotonic() + _RANK_0_ENDS_S
    while rank_zero.find() is not None and rank_zero.may_live() and time.monotonic() < deadline:
        time.sleep(0.25)
