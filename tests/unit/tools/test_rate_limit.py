"""Rate limits over all workers, with a clock that tests turn (case O32)."""

import asyncio
import heapq
import itertools

import pytest

from lit_rl.cluster import Runtime
from lit_rl.tools import FunctionTool, ToolSession
from lit_rl.tools.rate_limit import RateLimit, RateLimiter, attach_rate_limits, create_rate_limiters, rate_limit_of


class FakeClock:
    def __init__(self):
        self.now, self._calls, self._order = 0.0, [], itertools.count()

    def time(self):
        return self.now

    def call_later(self, delay, callback):
        call = [self.now + delay, next(self._order), callback]
        heapq.heappush(self._calls, call)

        class Handle:
            def cancel(self):
                call[2] = lambda: None

        return Handle()

    async def advance(self, until):
        await settle()
        while self._calls and self._calls[0][0] <= until:
            at, _, callback = heapq.heappop(self._calls)
            self.now = max(self.now, at)
            callback()
            await settle()
        self.now = until


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


def grant_times(limit, num_requests, job_s=None, until=100.0):
    async def main():
        clock, times, most = FakeClock(), [], 0
        limiter = RateLimiter(limit, clock)

        async def request():
            nonlocal most
            lease = await limiter.acquire()
            times.append(clock.time())
            most = max(most, (await limiter.counts())["running"])
            if job_s is not None:
                done = asyncio.get_running_loop().create_future()
                clock.call_later(job_s, lambda: done.set_result(None))
                await done
            await limiter.release(lease)

        tasks = [asyncio.ensure_future(request()) for _ in range(num_requests)]
        await clock.advance(until)
        await asyncio.gather(*tasks)
        return times, most

    return asyncio.run(main())


def test_a_burst_then_the_rate():
    limit = RateLimit(requests_per_minute=60, burst=2)
    assert grant_times(limit, 5)[0] == pytest.approx([0, 0, 1, 2, 3])
    # Two workers with five requests each share the limit.
    assert grant_times(limit, 10)[0][-1] == pytest.approx(8)


def test_tokens_a_minute_bound_the_requests_too():
    limit = RateLimit(requests_per_minute=60, tokens_per_minute=30_000, tokens_per_request=1000, burst=2)
    assert grant_times(limit, 5)[0] == pytest.approx([0, 0, 2, 4, 6])
    loose = RateLimit(requests_per_minute=60, tokens_per_minute=600_000, tokens_per_request=1000, burst=2)
    assert grant_times(loose, 4)[0] == pytest.approx([0, 0, 1, 2])
    assert grant_times(RateLimit(tokens_per_minute=4000), 3)[0] == pytest.approx([0, 30, 60])


def test_never_more_than_the_concurrency():
    times, most = grant_times(RateLimit(max_concurrent=3), 8, job_s=1.0)
    assert most == 3
    assert times == pytest.approx([0, 0, 0, 1, 1, 1, 2, 2])


def test_a_cancelled_waiter_gives_its_place_back():
    async def main():
        clock = FakeClock()
        limiter = RateLimiter({"requests_per_minute": 60, "burst": 1}, clock)
        await limiter.acquire()
        waiting = [asyncio.ensure_future(limiter.acquire()) for _ in range(3)]
        await settle()
        waiting[0].cancel()
        await clock.advance(1.0)
        assert [task.done() for task in waiting] == [True, True, False]
        await clock.advance(2.0)
        assert waiting[2].done()

    asyncio.run(main())


def test_a_waiter_cancelled_as_it_is_granted_ends_its_lease():
    async def main():
        limiter = RateLimiter(RateLimit(max_concurrent=1), FakeClock())
        lease = await limiter.acquire()
        waiting = asyncio.ensure_future(limiter.acquire())
        await settle()
        await limiter.release(lease)
        waiting.cancel()
        await settle()
        assert await limiter.counts() == {"running": 0, "waiting": 0}

    asyncio.run(main())


def test_the_lease_of_a_dead_holder_expires():
    async def main():
        clock = FakeClock()
        limiter = RateLimiter(RateLimit(max_concurrent=1, lease_s=30), clock)
        dead = await limiter.acquire()
        waiting = asyncio.ensure_future(limiter.acquire())
        await clock.advance(29.0)
        assert not waiting.done()
        await clock.advance(30.0)
        assert waiting.done()
        await limiter.release(dead)
        assert (await limiter.counts())["running"] == 1

    asyncio.run(main())


def test_limits_read_from_a_tool_config():
    assert rate_limit_of({}) is None
    assert rate_limit_of({"rate_limit": 10, "enable_global_rate_limit": False}) is None
    assert rate_limit_of({"rate_limit": 10}) == RateLimit(max_concurrent=10)
    assert rate_limit_of({"rate_limit": {"max_concurrent": 3}, "requests_per_minute": 60, "burst": 2}) == RateLimit(
        max_concurrent=3, requests_per_minute=60, burst=2
    )
    assert rate_limit_of({"tokens_per_minute": 1e5, "tokens_per_request": 500}) == RateLimit(
        tokens_per_minute=1e5, tokens_per_request=500
    )
    with pytest.raises(ValueError, match="max_concurrent=0"):
        rate_limit_of({"rate_limit": 0})
    with pytest.raises(ValueError, match="requests_per_minute=nan"):
        rate_limit_of({"requests_per_minute": float("nan")})
    with pytest.raises(ValueError, match="got {'max_concurrent': 'ten'}"):
        rate_limit_of({"rate_limit": "ten"})
    with pytest.raises(ValueError, match="unexpected keyword argument 'per_minute'"):
        rate_limit_of({"rate_limit": {"per_minute": 3}})


def test_sessions_share_a_limiter_through_a_worker():
    running, most = 0, 0

    async def work():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    schema = {"type": "function", "function": {"name": "w", "description": "", "parameters": {"type": "object"}}}
    tool = FunctionTool(work, "w", schema)
    tool.config = {"rate_limit": 2}

    async def main(handle):
        attach_rate_limits({"w": tool}, {"w": handle})

        async def trajectory():
            async with ToolSession({"w": tool}) as session:
                return await session.call("w", "{}")

        results = await asyncio.gather(*(trajectory() for _ in range(6)))
        return results, await handle.call("counts", timeout_s=5)

    with Runtime(backend="inline") as runtime:
        groups = create_rate_limiters(runtime, [tool])
        results, counts = runtime.loop.run(main(groups["w"].workers[0]), timeout_s=20, what="the calls")
        runtime.loop.run(groups["w"].stop(5), timeout_s=10, what="stopping the limiter")
    assert [result.status for result in results] == ["ok"] * 6
    assert most == 2
    assert counts == {"running": 0, "waiting": 0}


def test_a_caller_that_gave_up_ends_its_lease_whether_it_was_granted_or_not():
    async def main():
        limiter = RateLimiter(RateLimit(max_concurrent=1), FakeClock())
        await limiter.acquire("granted")
        waiting = asyncio.ensure_future(limiter.acquire("waiting"))
        await settle()
        await limiter.release("waiting")
        await limiter.release("granted")
        await settle()
        assert waiting.cancelled()
        assert await limiter.counts() == {"running": 0, "waiting": 0}

    asyncio.run(main())
