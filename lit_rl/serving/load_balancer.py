"""Which replica serves a request: least in flight, but a conversation stays where its prefix is cached.

One balancer per run, served as a worker; clients talk to it in batches (`LoadBalancer.exchange`). It knows servers by
id only and never talks to them: that they fail is reported by the clients.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Requests by which a conversation's server may lead before its load counts against stickiness at all: an engine hardly
# notices so few, while a lost prefix cache costs a whole prefill.
_FREE_LEAD = 8


class NoServerAvailableError(RuntimeError):
    """There is no server, or every one is ejected for now."""


@dataclass
class _Server:
    """State of one server."""

    order: int
    handle: Any = None
    inflight: int = 0
    num_conversations: int = 0  # in the sticky map
    failures_in_a_row: int = 0
    next_probe_s: float | None = None  # set while ejected


@dataclass
class _Lease:
    """Requests in flight of one client, by server."""

    inflight: Counter[str]
    expires_s: float


class LoadBalancer:
    """Chooses servers, and counts what is in flight on each.

    A new conversation goes to the server with the fewest requests in flight; ties go to the one with fewer
    conversations, then to the first added. Later turns of a conversation go to the same server, unless that is gone,
    ejected, or loaded beyond ``max_load_ratio``. Safe to call from several threads.

    Args:
        servers: Ids, or ids with handles that `get_handles` gives out.
        sticky_capacity: Conversations remembered; the least recently used are forgotten.
        max_load_ratio: A conversation leaves its server when that has more than ``max_load_ratio`` times the requests
            of the least loaded one, plus 8. ``None``: it never leaves for load.
        max_failures: Failures in a row after which a server is ejected; at least 1.
        probe_after_s: Seconds after which an ejected server gets one request as a probe, and so on after each.
        lease_s: Seconds after which the requests of a client that is not heard from no longer count.
        is_deterministic: Choose by a digest of the conversation id alone, so that a rerun routes alike.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        servers: Mapping[str, Any] | Iterable[str] = (),
        *,
        sticky_capacity: int = 10_000,
        max_load_ratio: float | None = 4.0,
        max_failures: int = 3,
        probe_after_s: float = 30.0,
        lease_s: float = 60.0,
        is_deterministic: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for option, value in (("sticky_capacity", sticky_capacity), ("max_failures", max_failures)):
            if value < 1:
                raise ValueError(f"LoadBalancer({option}={value}): must be at least 1.")
        if max_load_ratio is not None and max_load_ratio < 1:
            raise ValueError(f"LoadBalancer(max_load_ratio={max_load_ratio}): must be at least 1, or None.")
        self._sticky_capacity = sticky_capacity
        self._max_load_ratio = max_load_ratio
        self._max_failures = max_failures
        self._probe_after_s = probe_after_s
        self._lease_s = lease_s
        self._is_deterministic = is_deterministic
        self._clock = clock
        self._servers: dict[str, _Server] = {}
        self._server_of: OrderedDict[str, str] = OrderedDict()
        self._leases: dict[str, _Lease] = {}
        self._num_added = 0
        self._num_ejections = 0
        # Ray runs ordinary methods of a worker in threads, and asynchronous ones on its loop.
        self._lock = threading.RLock()
        self.add_servers(servers)

    def acquire(self, conversation_id: str, *, owner: str = "", avoid: Collection[str] = ()) -> str:
        """Return the id of the server to use, and count a request on it until `release`.

        Args:
            conversation_id: Turns of one conversation share it.
            owner: Client whose lease the request is counted under; the default one's never expires.
            avoid: Servers that have just failed this request; used only if there is no other.

        Raises:
            NoServerAvailableError: If there is no server, or every one is ejected and no probe is due.
        """
        with self._lock:
            self._expire_leases()
            server_id = self._choose(conversation_id, avoid)
            server = self._servers[server_id]
            if server.next_probe_s is not None:
                server.next_probe_s = self._clock() + self._probe_after_s
            self._remember(conversation_id, server_id)
            server.inflight += 1
            self._lease(owner).inflight[server_id] += 1
            return server_id

    def release(self, server_id: str, *, owner: str = "", has_failed: bool = False, is_dead: bool = False) -> None:
        """Take back a request counted by `acquire`; never below zero, unknown servers are ignored.

        Args:
            server_id: What `acquire` returned.
            owner: As in `acquire`.
            has_failed: The server failed (not the request): see `report_failure`. Otherwise it answered.
            is_dead: Its process is gone.
        """
        with self._lock:
            lease = self._lease(owner)
            server = self._servers.get(server_id)
            if lease.inflight[server_id] > 0:
                lease.inflight[server_id] -= 1
                if server is not None:
                    server.inflight -= 1
            if has_failed:
                self.report_failure(server_id, is_dead=is_dead)
            elif server is not None:
                server.failures_in_a_row, server.next_probe_s = 0, None

    def report_failure(self, server_id: str, *, is_dead: bool = False) -> None:
        """Count a failure. After ``max_failures`` in a row, or at once if ``is_dead``, the server is ejected."""
        with self._lock:
            server = self._servers.get(server_id)
            if server is None:
                return
            server.failures_in_a_row += 1
            if is_dead or server.failures_in_a_row >= self._max_failures:
                self._num_ejections += server.next_probe_s is None
                server.next_probe_s = self._clock() + self._probe_after_s
                self._forget_conversations(server_id)

    async def exchange(
        self, owner: str, released: Sequence[tuple[str, bool, bool]], requests: Sequence[tuple[str, tuple[str, ...]]]
    ) -> list[str | None]:
        """Release and acquire many at once, and renew the owner's lease.

        Args:
            owner: Client that asks.
            released: ``(server_id, has_failed, is_dead)`` each, as in `release`.
            requests: ``(conversation_id, avoid)`` each, as in `acquire`; served after the releases, in order.

        Returns:
            A server id for each request; ``None`` where no server is available.
        """
        with self._lock:
            self._lease(owner)
            for server_id, has_failed, is_dead in released:
                self.release(server_id, owner=owner, has_failed=has_failed, is_dead=is_dead)
            return [self._acquire_or_none(conversation_id, owner, avoid) for conversation_id, avoid in requests]

    async def acquire_many(self, conversation_ids: Sequence[str], owner: str = "") -> list[str | None]:
        """Acquire a server for each conversation; ``None`` where none is available."""
        return await self.exchange(owner, [], [(conversation_id, ()) for conversation_id in conversation_ids])

    async def release_many(self, server_ids: Sequence[str], owner: str = "") -> None:
        """Release a request on each server, all of them answered."""
        await self.exchange(owner, [(server_id, False, False) for server_id in server_ids], [])

    def add_servers(self, servers: Mapping[str, Any] | Iterable[str]) -> None:
        """Add servers with nothing in flight; one that is there already starts afresh."""
        with self._lock:
            handles = servers if isinstance(servers, Mapping) else dict.fromkeys(servers)
            for server_id, handle in handles.items():
                self._drop(server_id)
                self._servers[server_id] = _Server(order=self._num_added, handle=handle)
                self._num_added += 1

    def remove_servers(self, server_ids: Iterable[str]) -> None:
        """Remove servers; their conversations go elsewhere with the next turn, and their late releases are ignored."""
        with self._lock:
            for server_id in server_ids:
                self._drop(server_id)

    def clear_sticky_cache(self) -> dict[str, Any]:
        """Forget every conversation's server, and return how many there were and the servers' loads."""
        with self._lock:
            num_cleared = len(self._server_of)
            self._server_of.clear()
            for server in self._servers.values():
                server.num_conversations = 0
            return {"cleared_entries": num_cleared, "server_loads": self._loads()}

    def get_inflight_count(self, server_id: str) -> int:
        """Return the requests in flight on one server; 0 for an unknown one."""
        with self._lock:
            self._expire_leases()
            return self._servers[server_id].inflight if server_id in self._servers else 0

    def get_total_inflight(self) -> int:
        """Return the requests in flight on all servers."""
        with self._lock:
            self._expire_leases()
            return sum(self._loads().values())

    def get_all_servers(self) -> list[str]:
        """Return the ids of all servers, in the order they were added."""
        with self._lock:
            return list(self._servers)

    def get_handles(self) -> dict[str, Any]:
        """Return the handles the servers were added with, where there are any."""
        with self._lock:
            return {key: server.handle for key, server in self._servers.items() if server.handle is not None}

    def get_status(self) -> dict[str, Any]:
        """Return loads, ejected servers and counters, for logs."""
        with self._lock:
            self._expire_leases()
            loads = self._loads()
            return {
                "servers": loads,
                "total_inflight": sum(loads.values()),
                "active_servers": sum(server.next_probe_s is None for server in self._servers.values()),
                "ejected_servers": [key for key, server in self._servers.items() if server.next_probe_s is not None],
                "num_ejections": self._num_ejections,
                "sticky_entries": len(self._server_of),
                "registered_handles": sum(server.handle is not None for server in self._servers.values()),
            }

    def _acquire_or_none(self, conversation_id: str, owner: str, avoid: Collection[str]) -> str | None:
        try:
            return self.acquire(conversation_id, owner=owner, avoid=avoid)
        except NoServerAvailableError:
            return None

    def _choose(self, conversation_id: str, avoid: Collection[str]) -> str:
        now = self._clock()
        usable = {key: s for key, s in self._servers.items() if s.next_probe_s is None or s.next_probe_s <= now}
        if not usable:
            raise NoServerAvailableError(
                f"No available servers: {len(self._servers)} registered, {len(self._servers)} ejected after failures."
            )
        preferred = {key: s for key, s in usable.items() if key not in avoid} or usable
        if self._is_deterministic:
            digest = hashlib.blake2b(conversation_id.encode(), digest_size=8).digest()
            return list(preferred)[int.from_bytes(digest) % len(preferred)]
        least = min(preferred, key=lambda key: self._cost(preferred[key]))
        sticky = self._server_of.get(conversation_id)
        if sticky not in preferred:
            return least
        if self._max_load_ratio is not None:
            limit = self._max_load_ratio * preferred[least].inflight + _FREE_LEAD
            if preferred[sticky].inflight > limit:
                return least
        return sticky

    @staticmethod
    def _cost(server: _Server) -> tuple[int, int, int]:
        return server.inflight, server.num_conversations, server.order

    def _remember(self, conversation_id: str, server_id: str) -> None:
        self._forget(self._server_of.pop(conversation_id, None))
        self._server_of[conversation_id] = server_id
        self._servers[server_id].num_conversations += 1
        if len(self._server_of) > self._sticky_capacity:
            self._forget(self._server_of.popitem(last=False)[1])

    def _forget(self, server_id: str | None) -> None:
        if server_id in self._servers:
            self._servers[server_id].num_conversations -= 1

    def _forget_conversations(self, server_id: str) -> None:
        for conversation_id in [key for key, value in self._server_of.items() if value == server_id]:
            del self._server_of[conversation_id]
        if server_id in self._servers:
            self._servers[server_id].num_conversations = 0

    def _drop(self, server_id: str) -> None:
        if self._servers.pop(server_id, None) is not None:
            self._forget_conversations(server_id)
            for lease in self._leases.values():
                lease.inflight.pop(server_id, None)

    def _lease(self, owner: str) -> _Lease:
        """Return the owner's lease, renewed."""
        expires_s = self._clock() + self._lease_s if owner else float("inf")
        lease = self._leases.setdefault(owner, _Lease(Counter(), expires_s))
        lease.expires_s = expires_s
        return lease

    def _expire_leases(self) -> None:
        now = self._clock()
        for owner in [owner for owner, lease in self._leases.items() if lease.expires_s < now]:
            for server_id, count in self._leases.pop(owner).inflight.items():
                if server_id in self._servers:
                    self._servers[server_id].inflight -= count

    def _loads(self) -> dict[str, int]:
        return {server_id: server.inflight for server_id, server in self._servers.items()}
