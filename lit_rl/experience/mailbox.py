"""How what rank 0 has collected reaches the ranks that learn from it.

Position in the flow: collector (rank 0) -> shares -> **exchange** -> loader of each rank. With Ray, rank 0 puts one
object per rank into the object store and posts the references to a named `ExperienceMailbox`; each rank takes its own.
References travel inside lists, so that they stay references, and never through ``torch.distributed``: a plain pickle of
one cannot be fetched elsewhere, and a cloudpickled one pins its object for the life of the process (design D7). While
rank 0 collects, the others wait on the mailbox and not in a collective, so no process-group timeout limits a rollout.
Without Ray the shares go through ``scatter_object_list``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from lit_rl.cluster import (
    ProcessIdentity,
    Runtime,
    WorkerDied,
    WorkerGroup,
    WorkerHandle,
    fetch_object,
    find_worker,
    put_object,
)

MAILBOX = "experience-mailbox"
_BEAT_S = 5.0
_SILENCE_S = 60.0
"""How long rank 0's process may be silent. Its heart beats in a thread of its own, whatever the main thread does."""
_WAIT_S = 10.0
_ANSWER_S = 60.0
"""Longest answer of the mailbox, beyond the time it was asked to wait."""
_RANK_0_ENDS_S = 60.0


class RankZeroLost(RuntimeError):
    """Rank 0 has ended, or stopped answering, while this rank waited for it."""


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
            raise rank_zero_lost(what, self.rank, self.rank_zero, error) from error
        return received[0] if parts is None else parts[0]

    def close(self) -> None:
        """Nothing to end."""


class ExperienceMailbox:
    """Holds references of one exchange until the next is posted."""

    def __init__(self) -> None:
        self._number = -1
        self._refs: list[list[Any]] = []
        self._posted = asyncio.Condition()
        self._last_beat = time.monotonic()

    async def beat(self) -> None:
        """Rank 0 is there."""
        self._last_beat = time.monotonic()

    async def post(self, number: int, refs: list[list[Any]]) -> None:
        """Keep the references of exchange ``number``, one list per rank; those of the one before are dropped."""
        async with self._posted:
            self._number, self._refs = number, refs
            self._last_beat = time.monotonic()
            self._posted.notify_all()

    async def take(self, number: int, rank: int, wait_s: float) -> tuple[list[Any] | None, float]:
        """Return a rank's references of exchange ``number``, waiting for at most ``wait_s`` seconds.

        Returns:
            The references, or ``None`` if they are not there yet; and the seconds since rank 0 was last heard of.

        Raises:
            RuntimeError: If they have been dropped already.
        """
        async with self._posted:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._posted.wait_for(lambda: self._number >= number), wait_s)
            if self._number > number:
                raise RuntimeError(f"Rank {rank} asks for exchange {number}, rank 0 is at {self._number} already.")
            refs = self._refs[rank] if self._number == number else None
            return refs, time.monotonic() - self._last_beat


class MailboxExchange:
    """Rank 0's side: makes, posts, and lets the others know that it lives.

    Args:
        runtime: Where the mailbox lives.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._number = -1
        group = WorkerGroup.create(runtime, ExperienceMailbox, 1, name=MAILBOX)
        runtime.loop.run(group.ready(_ANSWER_S), timeout_s=_ANSWER_S + 10, what="the experience mailbox to start")
        self._mailbox: WorkerHandle = group.workers[0]
        self._heart = runtime.loop.submit(self._keep_beating())

    def scatter(self, what: str, make: Callable[[], Iterable[Any]]) -> Any:
        """See `ShareExchange`."""
        parts = iter(make())
        own = next(parts)
        refs: list[list[Any]] = [[]]  # rank 0 has its own part
        refs += ([put_object(part)] for part in parts)
        self._number += 1
        posting = self._mailbox.call("post", self._number, refs, timeout_s=_ANSWER_S)
        self._runtime.loop.run(posting, timeout_s=_ANSWER_S + 10, what=f"the mailbox to take {what}")
        return own

    def close(self) -> None:
        """Stop the heart; the runtime ends the mailbox."""
        self._heart.cancel()

    async def _keep_beating(self) -> None:
        while True:
            # Whoever waits notices a dead mailbox; here it is noticed at the next post.
            with contextlib.suppress(TimeoutError, WorkerDied):
                await self._mailbox.call("beat", timeout_s=_ANSWER_S)
            await asyncio.sleep(_BEAT_S)


class MailboxReceiver:
    """The side of every other rank.

    Args:
        runtime: Connected to rank 0's.
        rank: This rank, above 0.
        rank_zero: Rank 0's process.
        timeout_s: Longest wait for one exchange: that of the longest rollout.
    """

    def __init__(self, runtime: Runtime, rank: int, rank_zero: ProcessIdentity, timeout_s: float) -> None:
        self._runtime = runtime
        self._number = -1
        self.rank = rank
        self.rank_zero = rank_zero
        self.timeout_s = timeout_s
        self._mailbox = find_worker(runtime, f"{MAILBOX}-0")

    def scatter(self, what: str, make: Callable[[], Iterable[Any]]) -> Any:
        """See `ShareExchange`."""
        self._number += 1
        return self._runtime.loop.run(
            self._take(what), timeout_s=self.timeout_s, what=f"rank {self.rank} waited for {what} of rank 0"
        )

    def close(self) -> None:
        """Nothing to end."""

    async def _take(self, what: str) -> Any:
        while True:
            try:
                refs, silent_s = await self._mailbox.call(
                    "take", self._number, self.rank, _WAIT_S, timeout_s=_WAIT_S + _ANSWER_S
                )
                if refs is not None:
                    return await fetch_object(refs[0], timeout_s=_ANSWER_S, what=what)
            except (WorkerDied, TimeoutError) as error:
                raise await asyncio.to_thread(rank_zero_lost, what, self.rank, self.rank_zero, error) from error
            if silent_s > _SILENCE_S or not self.rank_zero.may_live():
                raise rank_zero_lost(what, self.rank, self.rank_zero, f"not heard of for {silent_s:.0f} s")


def rank_zero_lost(what: str, rank: int, rank_zero: ProcessIdentity, cause: object) -> RankZeroLost:
    """Return the error for a rank whose rank 0 has gone, once rank 0 has had the time to say why.

    Lightning's launcher kills rank 0 when another rank ends with an error (2.6), which would cut its message short.
    """
    deadline = time.monotonic() + _RANK_0_ENDS_S
    process = rank_zero.find()
    while process is not None and rank_zero.may_live() and time.monotonic() < deadline:
        time.sleep(0.25)
    return RankZeroLost(f"Rank 0 ended while rank {rank} waited for {what}: its own error says why ({cause}).")
