from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
import reward_samples

from lit_rl.cluster import Runtime, WorkerDied
from lit_rl.rewards import (
    OverlongShaping,
    RewardClient,
    RewardLoopManager,
    RewardLoopWorker,
    RewardPart,
    RewardResult,
    RewardSettings,
    ScoreRequest,
)
from lit_rl.types import Prompt, Trajectory


def score_requests(*texts: str) -> list[ScoreRequest]:
    return [ScoreRequest(row_id=f"row-{text}", data_source="test", solution_str=text) for text in texts]


def run(settings: RewardSettings, *texts: str) -> list[RewardResult]:
    async def score() -> list[RewardResult]:
        worker = RewardLoopWorker(settings)
        try:
            return await worker.score_many(score_requests(*texts))
        finally:
            await worker.close()

    return asyncio.run(score())


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_sync_and_async_functions_score_alike(isolation: str) -> None:
    for function, kwargs in [("reward_samples:length", {}), ("reward_samples:sleep_long_on_x", {"bonus": 1.0})]:
        settings = RewardSettings(function=function, kwargs=kwargs, isolation=isolation)
        assert [result.score for result in run(settings, "ab", "cd")] == [2.0, 2.0]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_raising_function_gives_an_error_with_its_traceback(isolation: str) -> None:
    settings = RewardSettings(function="reward_samples:raise_on_x", isolation=isolation)
    good, bad = run(settings, "a", "x")
    assert good.score == 1.0
    assert bad.score is None
    assert "Reward function reward_samples:raise_on_x, row row-x" in (bad.error or "")
    assert "LookupError" in (bad.error or "")
    assert "in raise_on_x" in (bad.error or "")


def test_endless_functions_are_killed_and_the_others_scored() -> None:  # O31
    texts = ["x" if i in (2, 5, 6) else "a" for i in range(13)]
    settings = RewardSettings(function="reward_samples:spin_on_x", isolation="process", num_processes=2, timeout_s=0.5)
    started = time.monotonic()
    results = run(settings, *texts)
    assert time.monotonic() - started < 10  # the case's own bound
    assert [result.score for result in results] == [None if text == "x" else 1.0 for text in texts]
    assert [result.is_timeout for result in results] == [text == "x" for text in texts]
    assert "data.rewards.timeout_s=0.5" in (results[2].error or "")
    scoring = [
        child for child in psutil.Process(os.getpid()).children() if "score_process" in " ".join(child.cmdline())
    ]
    assert scoring == []


def test_process_that_ends_itself_fails_its_sample_only() -> None:
    settings = RewardSettings(function="reward_samples:exit_on_x", isolation="process", num_processes=1)
    results = run(settings, "a", "x", "b")
    assert [result.score for result in results] == [1.0, None, 1.0]
    assert "exit code 3" in (results[1].error or "")


def test_slow_thread_times_out_without_holding_up_the_next_call() -> None:
    settings = RewardSettings(function="reward_samples:sleep_on_x", num_threads=1, timeout_s=0.05)
    results = run(settings, "x", "a", "b")
    assert [result.is_timeout for result in results] == [True, False, False]
    assert [result.score for result in results] == [None, 1.0, 1.0]


def test_async_function_is_cancelled_when_its_time_is_up() -> None:
    results = run(RewardSettings(function=reward_samples.sleep_long_on_x, timeout_s=0.05), "x", "a")
    assert [result.is_timeout for result in results] == [True, False]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(2), StopIteration(), KeyboardInterrupt()])
def test_no_exception_of_a_plain_function_escapes(error: BaseException) -> None:
    def raises(solution_str: str) -> float:
        raise error

    (result,) = run(RewardSettings(function=raises), "a")
    assert result.score is None
    assert type(error).__name__ in (result.error or "")


# SystemExit and KeyboardInterrupt in a coroutine end the loop: asyncio takes them for the wish to end the process.
@pytest.mark.parametrize("error", [asyncio.CancelledError(), StopIteration()])
def test_no_exception_of_an_async_function_escapes(error: BaseException) -> None:
    async def raises(solution_str: str) -> float:
        raise error

    (result,) = run(RewardSettings(function=raises), "a")
    assert result.score is None
    assert type(error).__name__ in (result.error or "")


def test_timeout_error_of_the_function_itself_is_not_taken_for_ours() -> None:
    def impatient(solution_str: str) -> float:
        raise TimeoutError("the judge did not answer")

    (result,) = run(RewardSettings(function=impatient), "a")
    assert not result.is_timeout
    assert "the judge did not answer" in (result.error or "")


def test_parts_are_weighted_added_and_each_logged() -> None:
    def quality(solution_str: str) -> dict[str, float]:
        return {"score": 0.5, "acc": 1.0}

    parts = [
        RewardPart(name="quality", function=quality, weight=2.0),
        RewardPart(name="length", function=reward_samples.length, weight=-0.1),
    ]
    (result,) = run(RewardSettings(parts=parts), "abc")
    assert result.score == pytest.approx(2.0 * 0.5 - 0.1 * 3.0)
    assert result.parts == {"quality": 0.5, "quality/acc": 1.0, "length": 3.0}


def test_one_failed_part_fails_the_score() -> None:
    parts = [
        RewardPart(name="good", function=reward_samples.length),
        RewardPart(name="bad", function=reward_samples.raise_on_x),
    ]
    (result,) = run(RewardSettings(parts=parts), "x")
    assert result.score is None
    assert "LookupError" in (result.error or "")


def test_overlong_penalty_is_added_and_logged() -> None:
    async def score() -> RewardResult:
        overlong = OverlongShaping(buffer_tokens=4, max_response_tokens=8)
        worker = RewardLoopWorker(RewardSettings(function=reward_samples.length, overlong=overlong))
        (request,) = score_requests("a")
        request.num_response_tokens = 6
        return await worker.score(request)

    result = asyncio.run(score())
    assert result.score == 1.0 - 0.5
    assert result.parts == {"overlong_reward": -0.5, "overlong": 1.0}


class FakeHandle:
    """A reward worker whose answers the test writes."""

    def __init__(self, name: str, reply: Callable[[], Awaitable[Any]]) -> None:
        self.name = name
        self.reply = reply
        self.num_calls = 0

    async def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        self.num_calls += 1
        return await self.reply()


def test_client_takes_the_worker_with_the_fewest_calls_in_flight() -> None:
    async def score() -> tuple[int, int]:
        release = asyncio.Event()

        async def slow() -> RewardResult:
            await release.wait()
            return RewardResult(score=0.0)

        async def quick() -> RewardResult:
            return RewardResult(score=1.0)

        slow_handle, quick_handle = FakeHandle("slow", slow), FakeHandle("quick", quick)
        client = RewardClient([slow_handle, quick_handle], 5.0)  # type: ignore[list-item]
        (request,) = score_requests("a")
        first = asyncio.create_task(client.score(request))
        await asyncio.sleep(0)
        for _ in range(5):
            await client.score(request)
        release.set()
        await first
        return slow_handle.num_calls, quick_handle.num_calls

    assert asyncio.run(score()) == (1, 5)


def test_client_goes_to_another_worker_when_one_has_died() -> None:
    async def dead() -> RewardResult:
        raise WorkerDied("dead")

    async def alive() -> RewardResult:
        return RewardResult(score=1.0)

    async def score(*replies: Callable[[], Awaitable[Any]]) -> RewardResult:
        handles = [FakeHandle(str(i), reply) for i, reply in enumerate(replies)]
        (request,) = score_requests("a")
        return await RewardClient(handles, 5.0).score(request)  # type: ignore[arg-type]

    assert asyncio.run(score(dead, alive)).score == 1.0
    with pytest.raises(WorkerDied):
        asyncio.run(score(dead, dead))


def test_client_waits_a_bounded_time_for_a_worker_that_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rl.rewards.client.RESTART_PAUSES_S", (0.01, 0.01))
    calls: list[int] = []

    def reply(num_deaths: int) -> Callable[[], Awaitable[Any]]:
        async def answer() -> RewardResult:
            calls.append(1)
            if len(calls) <= num_deaths:
                raise WorkerDied("reward-0", "killed", is_restarting=True)
            return RewardResult(score=1.0)

        return answer

    async def score(num_deaths: int) -> RewardResult:
        calls.clear()
        (request,) = score_requests("a")
        return await RewardClient([FakeHandle("0", reply(num_deaths))], 5.0).score(request)  # type: ignore[list-item]

    assert asyncio.run(score(2)).score == 1.0
    with pytest.raises(WorkerDied):
        asyncio.run(score(9))
    assert len(calls) == 3


def test_batch_is_scored_in_place_and_failed_or_scored_ones_are_left_alone() -> None:
    prompts = [Prompt(row_id=str(i), messages=[], data_source="test") for i in range(4)]
    trajectories = [trajectory("abc"), trajectory("x"), trajectory("a"), trajectory("a")]
    trajectories[2].error = "tool failed"
    trajectories[3].reward = 7.0
    with Runtime("inline") as runtime:
        manager = RewardLoopManager(runtime, RewardSettings(function=reward_samples.raise_on_x, num_workers=2))
        runtime.loop.run(manager.start(), timeout_s=10, what="start")
        assert len(manager.handles) == 2
        runtime.loop.run(manager.score_batch(prompts, trajectories), timeout_s=10, what="scores")
        runtime.loop.run(manager.stop(), timeout_s=10, what="stop")
        assert manager.handles == []
    assert [t.reward for t in trajectories] == [1.0, None, None, 7.0]
    assert "LookupError" in (trajectories[1].error or "")
    assert trajectories[2].error == "tool failed"


def test_manager_refuses_a_wrong_function_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="has no function 'lenght'"):
        RewardLoopManager(Runtime("inline"), RewardSettings(function="reward_samples:lenght"))


def trajectory(text: str) -> Trajectory:
    return Trajectory(
        row_id="r",
        group_id="g",
        prompt_ids=[],
        response_ids=[],
        loss_mask=[],
        rollout_logprobs=[],
        policy_versions=[],
        text=text,
    )
