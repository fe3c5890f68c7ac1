"""Rate limits for the whole run: requests or tokens a minute, requests at a time, however many workers there are.

Position in the flow: ToolSession -> SharedRateLimit -> **RateLimiter**, one per limited tool, in a worker of its
own. The limiter is plain asyncio with a clock that tests can replace. Every grant is a lease that ends by itself, so
a holder that dies takes nothing along.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lit_rl.cluster import Runtime, WorkerGroup, WorkerHandle

logger = logging.getLogger(__name__)

# Rounding of the clock must not make a token arrive a tick late, and then again.
_EPSILON = 1e-9
_RELEASE_TIMEOUT_S = 10.0


@dataclass(kw_only=True)
class RateLimit:
    """A limit that holds over all workers.

    Attributes:
        requests_per_minute: Requests that start per minute, more than 0; ``None``: no limit.
        tokens_per_minute: Tokens per minute that a service allows, more than 0; ``None``: no limit.
        tokens_per_request: Tokens that one request counts for, prompt and answer together.
        burst: Requests that may start at once after a pause, at least 1.
        max_concurrent: Requests that run at a time, at least 1; ``None``: no limit.
        lease_s: Seconds after which a request counts as ended although its holder has not said so.
    """

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    tokens_per_request: float = 2000.0
    burst: int = 1
    max_concurrent: int | None = None
    lease_s: float = 600.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an option out of its range."""
        for name in (
            "requests_per_minute",
            "tokens_per_minute",
            "tokens_per_request",
            "max_concurrent",
            "lease_s",
            "burst",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN is refused too
                raise ValueError(f"rate limit: {name}={value}: must be more than 0.")

    @property
    def requests_per_s(self) -> float | None:
        """Requests that may start per second under both rates; ``None``: no limit."""
        rates = [] if self.requests_per_minute is None else [self.requests_per_minute / 60.0]
        if self.tokens_per_minute is not None:
            # Every request counts the same, so the slower of the two buckets is the one that is waited for.
            rates.append(self.tokens_per_minute / self.tokens_per_request / 60.0)
        return min(rates, default=None)


class Clock(Protocol):
    """Time in seconds, and a call at a later time."""

    def time(self) -> float:
        """Seconds from any start."""
        ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> Any:
        """Call ``callback`` in ``delay`` seconds; the result has ``cancel()``."""
        ...


class RateLimiter:
    """Grants leases in the order of the requests.

    Args:
        limit: The limit.
        clock: Default: the running event loop.
    """

    def __init__(self, limit: RateLimit | Mapping[str, Any], clock: Clock | None = None) -> None:
        self.limit = limit if isinstance(limit, RateLimit) else RateLimit(**limit)
        self._clock = clock
        self._tokens = float(self.limit.burst)
        self._refilled_at: float | None = None
        self._waiters: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._expiry: dict[str, float] = {}
        self._timer: Any = None

    async def acquire(self, lease: str | None = None) -> str:
        """Wait for a lease and return its name; a cancelled waiter gives its place back.

        Args:
            lease: Name of the lease. A caller in another process draws it, so that it can also end a lease that was
                granted while it gave up.
        """
        lease = lease or uuid.uuid4().hex
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((lease, waiter))
        self._grant()
        try:
            await waiter
        except asyncio.CancelledError:
            waiter.cancel()
            self._end_lease(lease)
            raise
        return lease

    async def release(self, lease: str) -> None:
        """End a lease, or stop waiting for it; harmless for one that has expired."""
        for name, waiter in self._waiters:
            if name == lease:
                waiter.cancel()
        self._end_lease(lease)

    async def counts(self) -> dict[str, int]:
        """Return how many requests run and wait."""
        return {"running": len(self._expiry), "waiting": sum(not waiter.done() for _, waiter in self._waiters)}

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[None]:
        """Hold a lease inside the block."""
        lease = await self.acquire()
        try:
            yield
        finally:
            self._end_lease(lease)

    def _end_lease(self, lease: str) -> None:
        self._expiry.pop(lease, None)
        self._grant()

    def _grant(self) -> None:
        """Serve the waiters that may start now, and come back when the next one may."""
        clock = self._clock or asyncio.get_running_loop()
        now = clock.time()
        self._refill(now)
        for lease in [lease for lease, expiry in self._expiry.items() if expiry <= now]:
            logger.warning("A rate-limit lease of %g s expired: its holder did not end it.", self.limit.lease_s)
            del self._expiry[lease]
        next_at: float | None = None
        while self._waiters:
            lease, waiter = self._waiters[0]
            if waiter.done():
                self._waiters.popleft()
                continue
            next_at = self._next_start(now)
            if next_at is not None:
                break
            if self.limit.requests_per_s is not None:
                self._tokens -= 1.0
            self._expiry[lease] = now + self.limit.lease_s
            self._waiters.popleft()
            waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if next_at is not None and self._waiters:
            self._timer = clock.call_later(next_at - now, self._grant)

    def _refill(self, now: float) -> None:
        if self.limit.requests_per_s is not None and self._refilled_at is not None:
            gained = (now - self._refilled_at) * self.limit.requests_per_s
            self._tokens = min(float(self.limit.burst), self._tokens + gained)
        self._refilled_at = now

    def _next_start(self, now: float) -> float | None:
        """When the first waiter may start; ``None``: now."""
        if self.limit.max_concurrent is not None and len(self._expiry) >= self.limit.max_concurrent:
            return min(self._expiry.values())
        if self.limit.requests_per_s is not None and self._tokens < 1.0 - _EPSILON:
            return now + (1.0 - self._tokens) / self.limit.requests_per_s
        return None


class SharedRateLimit:
    """A limiter that lives in a worker, as its users see it.

    Args:
        handle: Worker with a `RateLimiter`.
        timeout_s: Longest wait for a lease, in seconds.
    """

    def __init__(self, handle: WorkerHandle, timeout_s: float = 600.0) -> None:
        self.handle = handle
        self.timeout_s = timeout_s

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[None]:
        """Hold a lease inside the block.

        Raises:
            TimeoutError: If none was granted in time.
        """
        from lit_rl.cluster import call_again

        lease = uuid.uuid4().hex
        try:
            await call_again(self.handle, "acquire", lease, timeout_s=self.timeout_s)
            yield
        finally:
            # Shielded: a cancelled trajectory must still give its lease back. Also after a failed call: the lease may
            # have been granted as the caller gave up.
            await asyncio.shield(asyncio.ensure_future(self._release(lease)))

    async def _release(self, lease: str) -> None:
        try:
            await self.handle.call("release", lease, timeout_s=_RELEASE_TIMEOUT_S)
        except (TimeoutError, RuntimeError) as error:
            logger.warning("A rate-limit lease could not be given back and will expire: %s", error)


def rate_limit_of(config: Mapping[str, Any]) -> RateLimit | None:
    """Return the limit that a tool's config asks for.

    Read are ``rate_limit`` (an int: requests at a time, as in verl; or the fields of `RateLimit`),
    ``requests_per_minute``, ``tokens_per_minute``, ``tokens_per_request`` and ``burst``. ``enable_global_rate_limit:
    false`` turns it off.

    Raises:
        ValueError: If they are no numbers, out of range, or none of those names.
    """
    if not config.get("enable_global_rate_limit", True):
        return None
    given = config.get("rate_limit")
    fields: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    if given is not None and not isinstance(given, Mapping):
        fields["max_concurrent"] = given
    for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_request", "burst"):
        if name in config:
            fields[name] = config[name]
    try:
        return RateLimit(**fields) if fields else None
    except TypeError as error:  # an unknown name, or a text where a number belongs
        raise ValueError(f"rate limit: {error}; got {fields}.") from error


def create_rate_limiters(runtime: Runtime, tools: Iterable[Any]) -> dict[str, WorkerGroup]:
    """Start one limiter worker per tool whose config asks for a limit.

    Args:
        runtime: Where the workers run.
        tools: The tools of the run.

    Returns:
        Groups of one worker, by tool name. The caller stops them; their handles go to `attach_rate_limits`.
    """
    from lit_rl.cluster import WorkerGroup

    groups = {}
    for tool in tools:
        limit = rate_limit_of(getattr(tool, "config", {}))
        if limit is not None:
            kwargs = {"limit": asdict(limit)}
            # Two managers may live in one runtime.
            name = f"rate_limit_{tool.name}_{uuid.uuid4().hex[:8]}"
            groups[tool.name] = WorkerGroup.create(runtime, RateLimiter, 1, name=name, kwargs=kwargs, restarts=True)
    return groups


def attach_rate_limits(tools: Mapping[str, Any], handles: Mapping[str, WorkerHandle]) -> None:
    """Let tools of this process take a lease from the run's limiters before every call."""
    for name, handle in handles.items():
        if name in tools:
            tools[name].rate_limiter = SharedRateLimit(handle)
