"""Client of a retrieval service: queries in, ranked documents out.

Position in the flow: SearchTool -> **RetrievalClient** -> HTTP service (``POST {"queries", "topk",
"return_scores"}``). All attempts of one request share one deadline. Answers are cached per query, and equal queries
in flight are asked once: the samples of a prompt tend to ask the same. Formatting for the policy is not done here.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_RETRIED_STATUS = frozenset({429, 500, 502, 503, 504})
_MAX_BODY_BYTES = 32 * 2**20
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 8.0


class RetrievalError(RuntimeError):
    """The service could not be reached, refused, or answered nonsense."""


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """The answer to a list of queries.

    Attributes:
        documents: Of each query, best first, in the order of the queries.
        num_cache_hits: Different queries that were answered before, or are being asked by another caller.
    """

    documents: list[list[Any]]
    num_cache_hits: int


class RetrievalClient:
    """Asks one retrieval service.

    Args:
        url: Address of the service's retrieve endpoint.
        topk: Documents per query.
        timeout_s: Seconds for one HTTP request.
        deadline_s: Seconds for a request with all its retries and pauses.
        max_attempts: HTTP requests at most.
        max_concurrent: HTTP requests at a time.
        cache_size: Queries whose documents are kept; 0 keeps none.
    """

    def __init__(
        self,
        url: str,
        *,
        topk: int = 3,
        timeout_s: float = 30.0,
        deadline_s: float = 60.0,
        max_attempts: int = 10,
        max_concurrent: int = 120,
        cache_size: int = 10_000,
    ) -> None:
        self.url = url
        self.topk = topk
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self.max_attempts = max_attempts
        self.max_concurrent = max_concurrent
        self.cache_size = cache_size
        self.num_requests = 0
        self.num_cache_hits = 0
        self._cache: OrderedDict[str, list[Any]] = OrderedDict()
        self._in_flight: dict[str, asyncio.Future] = {}
        self._session: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(max_concurrent)

    async def retrieve(self, queries: Sequence[str]) -> Retrieved:
        """Return the documents of each query.

        Raises:
            RetrievalError: With a short reason.
        """
        self._bind_loop()
        missing: list[str] = []
        futures: dict[str, asyncio.Future] = {}
        found: dict[str, list[Any]] = {}
        for query in dict.fromkeys(queries):
            if query in self._cache:
                self._cache.move_to_end(query)
                found[query] = self._cache[query]
            elif query in self._in_flight:
                futures[query] = self._in_flight[query]
            else:
                missing.append(query)
        num_cache_hits = len(found) + len(futures)
        self.num_cache_hits += num_cache_hits
        if missing:
            # A task of its own: when this caller is cancelled, others may still wait for the same queries.
            task = asyncio.ensure_future(self._fetch(missing))
            for query in missing:
                self._in_flight[query] = futures[query] = task
            task.add_done_callback(lambda done: self._finish(missing, done))
        for query, future in futures.items():
            answer = await asyncio.shield(future)
            found[query] = answer[query]
        return Retrieved(documents=[found[query] for query in queries], num_cache_hits=num_cache_hits)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = None

    def _bind_loop(self) -> None:
        """Start afresh on another event loop: connections and futures belong to one."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._session = loop, None
            self._in_flight.clear()
            self._slots = asyncio.Semaphore(self.max_concurrent)

    def _finish(self, queries: list[str], task: asyncio.Future) -> None:
        for query in queries:
            if self._in_flight.get(query) is task:
                del self._in_flight[query]
        if task.cancelled() or task.exception() is not None:
            return
        for query, documents in task.result().items():
            self._cache[query] = documents
        while len(self._cache) > self.cache_size:
            self._cache.popitem(last=False)

    async def _fetch(self, queries: list[str]) -> dict[str, list[Any]]:
        try:
            async with asyncio.timeout(self.deadline_s):
                async with self._slots:
                    return await self._fetch_with_retries(queries)
        except TimeoutError as error:
            raise RetrievalError(f"no answer within {self.deadline_s:g} s") from error

    async def _fetch_with_retries(self, queries: list[str]) -> dict[str, list[Any]]:
        import aiohttp

        for attempt in range(1, self.max_attempts + 1):
            try:
                async with asyncio.timeout(self.timeout_s):
                    return await self._post(queries)
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError, _Retryable) as error:
                # An outer time-out cancels, so a TimeoutError here is this attempt's own.
                reason = str(error) if isinstance(error, _Retryable) else f"{type(error).__name__}"
                if attempt == self.max_attempts:
                    raise RetrievalError(f"{reason} after {attempt} attempts") from error
            except aiohttp.ClientError as error:
                raise RetrievalError(f"{type(error).__name__}: {error}"[:200]) from error
            delay_s = min(_FIRST_DELAY_S * 2 ** (attempt - 1), _LONGEST_DELAY_S)
            # Jitter, so that the workers do not return all at once to a service that was down.
            await asyncio.sleep(delay_s * (0.5 + random.random()))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, queries: list[str]) -> dict[str, list[Any]]:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self.max_concurrent)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self.num_requests += 1
        request = {"queries": queries, "topk": self.topk, "return_scores": True}
        async with self._session.post(self.url, json=request) as reply:
            if reply.status in _RETRIED_STATUS:
                raise _Retryable(f"HTTP {reply.status}")
            if reply.status != 200:
                raise RetrievalError(f"HTTP {reply.status}")
            if (reply.content_length or 0) > _MAX_BODY_BYTES:
                raise RetrievalError(f"the reply has {reply.content_length} bytes")
            body = await reply.read()
        return _parse_reply(body, queries)


class _Retryable(Exception):
    pass


def _parse_reply(body: bytes, queries: list[str]) -> dict[str, list[Any]]:
    try:
        results = json.loads(body)["result"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise RetrievalError("the reply is no JSON object with 'result'") from error
    if not isinstance(results, list) or len(results) != len(queries):
        raise RetrievalError(f"the reply must hold one list per query, {len(queries)} in all")
    documents = {}
    for query, ranked in zip(queries, results, strict=True):
        if not isinstance(ranked, list):
            raise RetrievalError("the reply must hold one list of documents per query")
        # With scores each document is wrapped, without them it is not.
        documents[query] = [
            entry["document"] if isinstance(entry, dict) and "document" in entry else entry for entry in ranked
        ]
    return documents
