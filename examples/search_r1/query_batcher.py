"""Queries of concurrent requests, searched together: one forward pass of the embedder for all that wait.

Used by retrieval_server.py. One thread searches; while it works, further requests wait and form the next batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retriever import Retriever

Ranked = list[tuple[int, float]]
_GATHER_S = 0.002
"""Requests that were sent together arrive within this time."""


class Overloaded(RuntimeError):
    """Too many queries wait."""


@dataclass(kw_only=True)
class _Waiting:
    queries: Sequence[str]
    topk: int
    answer: asyncio.Future[list[Ranked]]


class QueryBatcher:
    """Searches for many callers.

    Args:
        retriever: Who searches.
        max_batch: Queries of one forward pass.
        max_waiting: Queries that may wait.
    """

    def __init__(self, retriever: Retriever, max_batch: int = 64, max_waiting: int = 4096) -> None:
        self.retriever = retriever
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="search")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to work."""
        self._task = asyncio.create_task(self._work_forever(), name="query-batcher")

    async def stop(self) -> None:
        """Answer nobody any more, and end the thread."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for waiting in self._waiting:
            waiting.answer.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def search(self, queries: Sequence[str], topk: int) -> list[Ranked]:
        """Return per query its ranked passages.

        Raises:
            Overloaded: If too many queries wait already.
        """
        if sum(len(waiting.queries) for waiting in self._waiting) + len(queries) > self.max_waiting:
            raise Overloaded(f"more than {self.max_waiting} queries wait")
        answer: asyncio.Future[list[Ranked]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(queries=queries, topk=topk, answer=answer))
        self._wake.set()
        return await answer

    async def _work_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            batch = self._take_batch()
            try:
                found = await loop.run_in_executor(self._thread, self._search_batch, batch)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the index or the model failed: these requests fail, the next are tried
                for waiting in batch:
                    if not waiting.answer.done():
                        waiting.answer.set_exception(error)
                continue
            for waiting, ranked in zip(batch, found, strict=True):
                if not waiting.answer.done():  # its client may have gone
                    waiting.answer.set_result(ranked)

    def _take_batch(self) -> list[_Waiting]:
        """Take whole requests, oldest first, up to ``max_batch`` queries; at least one request."""
        batch, num_queries = [], 0
        while self._waiting and (not batch or num_queries + len(self._waiting[0].queries) <= self.max_batch):
            waiting = self._waiting.pop(0)
            if not waiting.answer.done():
                batch.append(waiting)
                num_queries += len(waiting.queries)
        if not self._waiting:
            self._wake.clear()
        return batch

    def _search_batch(self, batch: list[_Waiting]) -> list[list[Ranked]]:
        queries = list(dict.fromkeys(query for waiting in batch for query in waiting.queries))
        if not queries:
            return [[] for _ in batch]
        topk = max(waiting.topk for waiting in batch)
        found: dict[str, Ranked] = {}
        for start in range(0, len(queries), self.max_batch):
            part = queries[start : start + self.max_batch]
            found.update(zip(part, self.retriever.search(part, topk), strict=True))
        return [[found[query][: waiting.topk] for query in waiting.queries] for waiting in batch]
