"""Choose a reward worker for each trajectory: the one with the fewest calls in flight.

Lives in agent workers (streaming) and in the trainer process (batches). A call whose worker died goes to another one,
or waits for the one that takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from lit_rl.cluster import RESTART_PAUSES_S, WorkerDied, WorkerHandle
from lit_rl.rewards.result import RewardResult, ScoreRequest


class RewardClient:
    """Sends requests to the reward workers.

    Args:
        handles: At least one worker.
        timeout_s: Longest wait for one answer in seconds, the worker's queue included.
    """

    def __init__(self, handles: Sequence[WorkerHandle], timeout_s: float) -> None:
        if not handles:
            raise ValueError("RewardClient needs at least one reward worker.")
        self._timeout_s = timeout_s
        self._handles = list(handles)
        self._in_flight = [0] * len(handles)

    async def score(self, request: ScoreRequest) -> RewardResult:
        """Score one trajectory.

        Raises:
            WorkerDied: If no reward worker is left.
            TimeoutError: If a worker does not answer; names it.
        """
        pauses = iter(RESTART_PAUSES_S)
        excluded: set[int] = set()
        while True:
            candidates = [i for i in range(len(self._handles)) if i not in excluded]
            chosen = min(candidates, key=self._in_flight.__getitem__)
            self._in_flight[chosen] += 1
            try:
                return await self._handles[chosen].call("score", request, timeout_s=self._timeout_s)
            except WorkerDied as error:
                excluded.add(chosen)
                if len(excluded) == len(self._handles):
                    pause_s = next(pauses, None) if error.is_restarting else None
                    if pause_s is None:
                        raise
                    await asyncio.sleep(pause_s)
                    excluded.clear()
            finally:
                self._in_flight[chosen] -= 1
