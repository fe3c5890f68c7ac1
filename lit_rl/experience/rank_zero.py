"""What a rank does when rank 0, which owns the rollout side, is gone."""

from __future__ import annotations

import time

from lit_rl.cluster import ProcessIdentity

_RANK_0_ENDS_S = 60.0


class RankZeroLost(RuntimeError):
    """Rank 0 has ended, or stopped answering, while this rank waited for it."""


def rank_zero_lost(what: str, rank: int, rank_zero: ProcessIdentity, cause: object) -> RankZeroLost:
    """Return the error for a rank whose rank 0 has gone, once rank 0 has had the time to say why.

    Lightning's launcher kills rank 0 when another rank ends with an error (2.6), which would cut its message short.
    """
    deadline = time.monotonic() + _RANK_0_ENDS_S
    process = rank_zero.find()
    while process is not None and rank_zero.may_live() and time.monotonic() < deadline:
        time.sleep(0.25)
    return RankZeroLost(f"Rank 0 ended while rank {rank} waited for {what}: its own error says why ({cause}).")
