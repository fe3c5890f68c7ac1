"""A client's line to the load balancer: what many requests ask within one tick travels in one remote call.

One session per client and process. Used by `LLMServerClient` only; the balancer's side is `LoadBalancer.exchange`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import deque

from lit_rl.cluster import WorkerHandle, call_again

# A release alone may wait this long for an acquire it can travel with.
_RELEASE_DELAY_S = 0.003


class BalancerSession:
    """Acquires and releases servers in batches, and renews the lease while requests are in flight.

    Bound to the event loop of its first `acquire`.

    Args:
        balancer: Worker that serves a `LoadBalancer`.
        timeout_s: Longest wait for one exchange, in seconds.
        renew_s: Seconds after which an idle session with requests in flight tells the balancer that it is alive; well
            below the balancer's ``lease_s``.
    """

    def __init__(self, balancer: WorkerHandle, timeout_s: float, renew_s: float = 15.0) -> None:
        self._balancer = balancer
        self._timeout_s = timeout_s
        self._renew_s = renew_s
        self._owner = uuid.uuid4().hex
        self._num_inflight = 0
        self._requests: list[tuple[str, tuple[str, ...], asyncio.Future[str | None]]] = []
        self._released: deque[tuple[str, bool, bool]] = deque()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.loop = asyncio.get_running_loop()

    async def acquire(self, conversation_id: str, avoid: tuple[str, ...] = ()) -> str | None:
        """Return a server id to be given back with `release`, or ``None`` if no server is available now."""
        answer: asyncio.Future[str | None] = self.loop.create_future()
        self._requests.append((conversation_id, avoid, answer))
        self._run()
        self._wake.set()
        return await answer

    def release(self, server_id: str, *, has_failed: bool = False, is_dead: bool = False) -> None:
        """Give a server back; the balancer learns of it with the next acquire, or within a few milliseconds."""
        self._num_inflight -= 1
        self._released.append((server_id, has_failed, is_dead))
        self._run()
        if not self._wake.is_set():
            self.loop.call_later(_RELEASE_DELAY_S, self._wake.set)

    def _run(self) -> None:
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._exchange_until_idle())

    async def _exchange_until_idle(self) -> None:
        while self._num_inflight > 0 or self._requests or self._released:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._renew_s):
                    await self._wake.wait()
            await asyncio.sleep(0)  # let the rest of this tick's requests in
            self._wake.clear()
            await self._exchange()

    async def _exchange(self) -> None:
        requests, self._requests = self._requests, []
        released, self._released = list(self._released), deque()
        try:
            asked = [(conversation_id, avoid) for conversation_id, avoid, _ in requests]
            # A balancer that starts again has forgotten all counts; what is released it does not miss.
            servers = await call_again(
                self._balancer, "exchange", self._owner, released, asked, timeout_s=self._timeout_s
            )
        except Exception as error:
            # Whether it was carried out is unknown. Under a new name, whatever it counted runs out with the old lease.
            self._owner = uuid.uuid4().hex
            for _, _, answer in requests:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, _, answer), server_id in zip(requests, servers, strict=True):
            self._num_inflight += server_id is not None
            if not answer.done():
                answer.set_result(server_id)
            elif server_id is not None:  # the request was cancelled meanwhile
                self.release(server_id)
