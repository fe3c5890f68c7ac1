"""How what rank 0 has collected reaches the ranks that learn from it.

Position in the flow: collector (rank 0) -> shares -> **exchange** -> loader of each rank. One rank keeps what it has;
with Ray the shares go through a mailbox (see `lit_rl.experience.mailbox`), without it through ``scatter_object_list``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from lit_rl.cluster import ProcessIdentity, Runtime
from lit_rl.experience.mailbox import MailboxExchange, MailboxReceiver
from lit_rl.experience.rank_zero import rank_zero_lost


class ShareExchange(Protocol):
    """Brings each rank its part of what rank 0 makes. Every rank calls it, in the same order."""

    def scatter(self, what: str, make: Callable[[], Iterable[Any]]) -> Any:
        """Return this rank's part.

        Args:
            what: What is made, as it should read after "while it waited for ".
            make: Called on rank 0 alone; returns one part per rank.

        Raises:
            RankZeroLost: On another rank, if rank 0 has ended meanwhile.
        """

    def close(self) -> None:
        """End what the exchange has started. Idempotent."""


class SoloExchange:
    """One rank: nothing to exchange."""

    def scatter(self, what: str, make: Callable[[], Iterable[Any]]) -> Any:
        """Return the only part."""
        (part,) = make()
        return part

    def close(self) -> None:
        """Nothing to end."""


class CollectiveExchange:
    """Through ``scatter_object_list``: for the inline backend. The process group's timeout limits a rollout.

    Args:
        rank: This rank.
        rank_zero: Rank 0's process.
    """

    def __init__(self, rank: int, rank_zero: ProcessIdentity) -> None:
        self.rank = rank
        self.rank_zero = rank_zero

    def scatter(self, what: str, make: Callable[[], Iterable[Any]]) -> Any:
        """See `ShareExchange`."""
        parts = list(make()) if self.rank == 0 else None
        received: list[Any] = [None]
        try:
            torch.distributed.scatter_object_list(received, parts, src=0)
        except RuntimeError as error:
            if self.rank == 0:
                raise  # another rank has ended
            raise rank_zero_lost(what, self.rank, self.rank_zero, error) from error
        return received[0] if parts is None else parts[0]

    def close(self) -> None:
        """Nothing to end."""


def exchange_of_rank_zero(runtime: Runtime, world_size: int, rank_zero: ProcessIdentity) -> ShareExchange:
    """Return rank 0's side, once its runtime has started.

    Args:
        runtime: Where the rollout side lives.
        world_size: Data-parallel ranks.
        rank_zero: This process.
    """
    if world_size == 1:
        return SoloExchange()
    return CollectiveExchange(0, rank_zero) if runtime.backend == "inline" else MailboxExchange(runtime)


def exchange_of_rank(runtime: Runtime, rank: int, rank_zero: ProcessIdentity, timeout_s: float) -> ShareExchange:
    """Connect to rank 0's exchange and return another rank's side.

    Args:
        runtime: Not started yet; knows the address of rank 0's.
        rank: Above 0.
        rank_zero: Rank 0's process.
        timeout_s: Longest rollout.
    """
    if runtime.backend == "inline":
        return CollectiveExchange(rank, rank_zero)
    runtime.start()
    return MailboxReceiver(runtime, rank, rank_zero, timeout_s)
