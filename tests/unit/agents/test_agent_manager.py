from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from agent_fakes import END, EchoClient, FaultyLoop, FixedClient, NeverEndingLoop, ScoringLoop, answer, letters, request

from lit_rl.agents import AgentLoopManager, AgentSettings, RolloutFailed, TrajectoryRequest, split_evenly
from lit_rl.agents.settings import AgentLoopSpec
from lit_rl.agents.worker import AgentLoopWorker
from lit_rl.cluster import Runtime, WorkerDied
from lit_rl.cluster.inline_backend import InlineWorkerHandle
from lit_rl.rewards import RewardLoopManager, RewardSettings
from lit_rl.types import SamplingParams, Trajectory


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime("inline") as started:
        yield started


def generate(
    runtime: Runtime,
    client: object,
    requests: list[TrajectoryRequest],
    *,
    rewards: RewardLoopManager | None = None,
    finished: list[Trajectory] | None = None,
    **settings: object,
) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        if rewards is not None:
            await rewards.start()
        manager = AgentLoopManager(
            runtime,
            AgentSettings(**{"num_workers": 2, **settings}),  # type: ignore[arg-type]
            client,  # type: ignore[arg-type]
            letters(),
            rewards.handles if rewards is not None else (),
        )
        await manager.start()
        try:
            on_finished = finished.append if finished is not None else None
            return await manager.generate(requests, SamplingParams(max_tokens=8), on_finished=on_finished)
        finally:
            await manager.stop()

    return runtime.loop.run(run(), timeout_s=20, what="the rollout")


def test_items_are_split_evenly_without_a_divisibility_rule() -> None:  # O17
    assert [len(part) for part in split_evenly(60, 8)] == [8, 8, 8, 8, 7, 7, 7, 7]
    assert [list(part) for part in split_evenly(2, 4)] == [[0], [1]]
    assert split_evenly(0, 4) == []
    assert [i for part in split_evenly(61, 8) for i in part] == list(range(61))


@pytest.mark.parametrize(("num_requests", "num_workers"), [(7, 3), (2, 4), (0, 4)])
def test_results_come_in_input_order_each_once(runtime: Runtime, num_requests: int, num_workers: int) -> None:  # O17
    requests = [request(letter) for letter in "abcdefg"[:num_requests]]
    finished: list[Trajectory] = []
    trajectories = generate(runtime, EchoClient(), requests, num_workers=num_workers, finished=finished)
    assert [trajectory.text for trajectory in trajectories] == list("abcdefg"[:num_requests])
    assert sorted(trajectory.row_id for trajectory in finished) == [r.prompt.row_id for r in requests]


def test_trajectory_that_runs_while_others_are_sent_is_not_lost() -> None:
    class SlowOnB(EchoClient):
        async def generate(self, prompt_ids, sampling, conversation_id):
            await asyncio.sleep(0.4 if prompt_ids == [11] else 0.0)  # longer than a batch is held back
            return await super().generate(prompt_ids, sampling, conversation_id)

    async def run() -> list[list[int]]:
        worker = AgentLoopWorker(AgentSettings(), SlowOnB(), letters())
        stream = worker.run([request(letter) for letter in "abc"], SamplingParams())
        return [[index for index, _ in batch] async for batch in stream]

    assert asyncio.run(run()) == [[0, 2], [1]]


def test_identity_and_seed_are_those_of_the_request(runtime: Runtime) -> None:
    client = EchoClient()
    wanted = request("a", sample_index=3)
    wanted.seed = 17
    (trajectory,) = generate(runtime, client, [wanted])
    assert (trajectory.row_id, trajectory.group_id, trajectory.sample_index) == ("row-a", "group-a", 3)
    assert (trajectory.seed, trajectory.data_source) == (17, "letters")
    assert client.calls[0][1].seed == 17


def test_each_trajectory_is_its_own_conversation(runtime: Runtime) -> None:
    client = EchoClient()
    generate(runtime, client, [request("a", sample_index=i) for i in range(4)])
    assert len({conversation_id for _, _, conversation_id in client.calls}) == 4


def test_trajectory_is_scored_as_it_ends_with_its_own_copy_of_extra_info(runtime: Runtime) -> None:
    seen: list[dict] = []

    def reward(solution_str: str, ground_truth: str, extra_info: dict) -> dict:
        seen.append(dict(extra_info))
        extra_info["level"].append("spoilt")
        return {"score": solution_str == ground_truth, "length": len(solution_str)}

    row = {"extra_info": {"level": []}}
    requests = [request("ab", ground_truth="ab", **row), request("ab", 1, ground_truth="x", **row)]
    rewards = RewardLoopManager(runtime, RewardSettings(function=reward, num_workers=2))
    trajectories = generate(runtime, EchoClient(), requests, rewards=rewards)
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0]
    assert [trajectory.reward_parts for trajectory in trajectories] == [{"length": 2.0}] * 2
    assert row == {"extra_info": {"level": []}}
    assert seen[0]["num_turns"] == 2
    assert seen[0]["num_response_tokens"] == 3
    assert trajectories[0].metrics["score_s"] >= 0


def test_empty_response_is_scored_as_the_empty_text(runtime: Runtime) -> None:  # O16
    texts: list[str] = []

    def reward(solution_str: str) -> float:
        texts.append(solution_str)
        return 0.0

    rewards = RewardLoopManager(runtime, RewardSettings(function=reward, num_workers=1))
    (trajectory,) = generate(runtime, FixedClient(answer([])), [request("a")], rewards=rewards)
    assert texts == [""]
    assert trajectory.reward == 0.0
    assert not trajectory.has_failed


def test_one_raising_reward_marks_its_trajectory_only(runtime: Runtime, caplog) -> None:  # O28
    def reward(solution_str: str) -> float:
        if solution_str == "d":
            raise ZeroDivisionError("no reward for d")
        return 1.0

    rewards = RewardLoopManager(runtime, RewardSettings(function=reward, num_workers=1))
    trajectories = generate(runtime, EchoClient(), [request(letter) for letter in "abcdefgh"], rewards=rewards)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 3 + [None] + [1.0] * 4
    assert [trajectory.has_failed for trajectory in trajectories].count(True) == 1
    assert "row row-d" in (trajectories[3].error or "")
    assert "ZeroDivisionError: no reward for d" in (trajectories[3].error or "")
    assert trajectories[3].metrics["reward_error"] == 1.0
    assert caplog.text.count("ZeroDivisionError: no reward for d") == 1


def test_rollout_stops_with_the_original_error_when_every_reward_raises(runtime: Runtime) -> None:  # O28
    def reward(solution_str: str) -> float:
        raise ZeroDivisionError("never any reward")

    rewards = RewardLoopManager(runtime, RewardSettings(function=reward, num_workers=1))
    with pytest.raises(RolloutFailed, match=r"All 8 trajectories failed[\s\S]*ZeroDivisionError: never any reward"):
        generate(runtime, EchoClient(), [request(letter) for letter in "abcdefgh"], rewards=rewards)


def test_prompt_longer_than_the_model_fails_its_trajectory_and_is_not_retried(runtime: Runtime) -> None:
    client = EchoClient(fail=lambda ids: ValueError("prompt has 9 tokens, model 8") if len(ids) > 8 else None)
    trajectories = generate(runtime, client, [request("abcdefghi"), request("a")])
    assert "row-abcdefghi" in (trajectories[0].error or "")
    assert "prompt has 9 tokens, model 8" in (trajectories[0].error or "")
    assert trajectories[1].error is None
    assert len(client.calls) == 2


def test_unknown_agent_name_fails_that_row_and_lists_the_known_ones(runtime: Runtime) -> None:
    trajectories = generate(runtime, EchoClient(), [request("a", agent_name="singel_turn"), request("b")])
    known = "Known: openai_agent, single_turn_agent, tool_agent"
    assert f"Unknown agent loop 'singel_turn'. {known}" in (trajectories[0].error or "")
    assert trajectories[1].text == "b"


def test_unknown_default_loop_fails_at_start(runtime: Runtime) -> None:
    with pytest.raises(ValueError, match="Unknown agent loop 'nothing'"):
        generate(runtime, EchoClient(), [request("a")], default_agent_loop="nothing")


def test_row_chooses_its_loop_and_a_loop_that_scores_needs_no_reward_worker(runtime: Runtime) -> None:
    def reward(solution_str: str) -> float:
        return 5.0

    rewards = RewardLoopManager(runtime, RewardSettings(function=reward, num_workers=1))
    path = f"{ScoringLoop.__module__}.{ScoringLoop.__qualname__}"
    trajectories = generate(
        runtime,
        EchoClient(),
        [request("a", agent_name="scoring"), request("b")],
        rewards=rewards,
        agent_loops={"scoring": AgentLoopSpec(loop_class=path, options={"reward": 0.25})},
    )
    assert [trajectory.reward for trajectory in trajectories] == [0.25, 5.0]


def test_endless_trajectory_is_cancelled_and_marked_and_the_others_stay(runtime: Runtime) -> None:
    NeverEndingLoop.cancelled.clear()
    path = f"{NeverEndingLoop.__module__}.{NeverEndingLoop.__qualname__}"
    trajectories = generate(
        runtime, EchoClient(), [request("a", agent_name=path), request("b")], trajectory_timeout_s=0.1
    )
    assert "data.agents.trajectory_timeout_s=0.1" in (trajectories[0].error or "")
    assert trajectories[1].text == "b"
    assert NeverEndingLoop.cancelled == ["row-a"]


def test_infrastructure_failure_is_started_again_and_counted(runtime: Runtime) -> None:
    failures = [ConnectionError("replica 0 is gone")] * 2
    client = EchoClient(fail=lambda ids: failures.pop() if failures and ids == [10] else None)
    trajectories = generate(runtime, client, [request("a"), request("b")])
    assert [trajectory.text for trajectory in trajectories] == ["a", "b"]
    assert [trajectory.metrics["num_resubmitted"] for trajectory in trajectories] == [2.0, 0.0]


def test_infrastructure_failure_that_stays_is_marked_as_such(runtime: Runtime) -> None:
    client = EchoClient(fail=lambda ids: ConnectionError("replica 0 is gone") if ids == [10] else None)
    trajectories = generate(runtime, client, [request("a"), request("b")], max_resubmissions=1)
    assert (trajectories[0].error or "").startswith("infrastructure: row row-a")
    assert len([ids for ids, _, _ in client.calls if ids == [10]]) == 2


def test_unfinished_trajectories_of_a_dead_worker_go_to_the_others(runtime: Runtime) -> None:
    async def run() -> tuple[list[Trajectory], int]:
        client = EchoClient(delay_s=0.5)
        manager = AgentLoopManager(runtime, AgentSettings(num_workers=3), client, letters())
        await manager.start()
        victim = manager._workers[0]
        rollout = asyncio.create_task(manager.generate([request(x) for x in "abcdefg"], SamplingParams()))
        await asyncio.sleep(0.2)
        await victim.stop(1.0)
        trajectories = await rollout
        num_left = len(manager._workers)
        await manager.start()
        num_replaced = len(manager._workers) - num_left
        await manager.stop()
        return trajectories, num_replaced

    trajectories, num_replaced = runtime.loop.run(run(), timeout_s=20, what="the rollout")
    assert [trajectory.text for trajectory in trajectories] == list("abcdefg")
    assert [trajectory.metrics["num_resubmitted"] for trajectory in trajectories] == [1.0] * 3 + [0.0] * 4
    assert num_replaced == 1


@pytest.mark.parametrize(("num_deaths", "num_workers"), [(1, 1), (2, 2), (4, 2)])
def test_workers_that_die_as_they_start_are_started_again(
    monkeypatch: pytest.MonkeyPatch, num_deaths: int, num_workers: int
) -> None:
    """As on a node that is lost, which counts as alive for a while. One of two is enough to go on."""
    monkeypatch.setattr("lit_rl.agents.manager.RESTART_PAUSES_S", (0.01, 0.01))
    deaths: list[str] = []

    class Mortal(InlineWorkerHandle):
        async def ready(self, timeout_s: float) -> None:
            if len(deaths) < num_deaths and self.name.startswith("agent_loop_worker"):
                deaths.append(self.name)
                raise WorkerDied(self.name)
            await super().ready(timeout_s)

    monkeypatch.setattr("lit_rl.cluster.worker_group.InlineWorkerHandle", Mortal)
    with Runtime("inline") as runtime:
        manager = AgentLoopManager(runtime, AgentSettings(num_workers=2), EchoClient(), letters())
        rollout = manager.generate([request(letter) for letter in "abcd"], SamplingParams())
        trajectories = runtime.loop.run(rollout, timeout_s=20, what="the rollout")
        assert len(manager._workers) == num_workers
        runtime.loop.run(manager.stop(), timeout_s=20, what="the stop")
    assert [trajectory.error for trajectory in trajectories] == [None] * 4


def test_workers_that_never_start_end_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rl.agents.manager.RESTART_PAUSES_S", (0.01,))

    class Dead(InlineWorkerHandle):
        async def ready(self, timeout_s: float) -> None:
            raise WorkerDied(self.name)

    monkeypatch.setattr("lit_rl.cluster.worker_group.InlineWorkerHandle", Dead)
    with Runtime("inline") as runtime:
        manager = AgentLoopManager(runtime, AgentSettings(num_workers=2), EchoClient(), letters())
        with pytest.raises(WorkerDied, match="agent_loop_worker"):
            runtime.loop.run(manager.start(), timeout_s=20, what="the start")
        runtime.loop.run(manager.stop(), timeout_s=20, what="the stop")


def test_no_more_trajectories_run_at_once_than_allowed(runtime: Runtime) -> None:
    client = CountingClient()
    generate(runtime, client, [request(x) for x in "abcdefghijkl"], num_workers=1, max_concurrent_trajectories=3)
    assert client.most == 3


class CountingClient(EchoClient):
    def __init__(self) -> None:
        super().__init__(delay_s=0.01)
        self.running = 0
        self.most = 0

    async def generate(self, prompt_ids, sampling, conversation_id):
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await super().generate(prompt_ids, sampling, conversation_id)
        finally:
            self.running -= 1


def test_closing_the_stream_cancels_what_still_runs() -> None:
    async def run() -> None:
        path = f"{NeverEndingLoop.__module__}.{NeverEndingLoop.__qualname__}"
        settings = AgentSettings(default_agent_loop=path)
        worker = AgentLoopWorker(settings, EchoClient(), letters())
        stream = worker.run([request("a"), request("b")], SamplingParams())
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait({waiting})

    NeverEndingLoop.cancelled.clear()
    asyncio.run(run())
    assert sorted(NeverEndingLoop.cancelled) == ["row-a", "row-b"]


def test_cancelled_rollout_cancels_its_trajectories(runtime: Runtime) -> None:
    path = f"{NeverEndingLoop.__module__}.{NeverEndingLoop.__qualname__}"

    async def run() -> None:
        settings = AgentSettings(num_workers=2, default_agent_loop=path)
        manager = AgentLoopManager(runtime, settings, EchoClient(), letters())
        await manager.start()
        rollout = asyncio.create_task(manager.generate([request("a"), request("b")], SamplingParams()))
        await asyncio.sleep(0.1)
        rollout.cancel()
        await asyncio.gather(rollout, return_exceptions=True)

    NeverEndingLoop.cancelled.clear()
    runtime.loop.run(run(), timeout_s=20, what="the rollout")
    assert sorted(NeverEndingLoop.cancelled) == ["row-a", "row-b"]


def test_worker_gives_a_sign_of_life_while_nothing_ends(monkeypatch) -> None:
    async def first_item() -> list[tuple[int, Trajectory]]:
        path = f"{NeverEndingLoop.__module__}.{NeverEndingLoop.__qualname__}"
        stream = AgentLoopWorker(AgentSettings(default_agent_loop=path), EchoClient(), letters()).run(
            [request("a")], SamplingParams()
        )
        item = await asyncio.wait_for(anext(stream), 5)
        await stream.aclose()
        return item

    monkeypatch.setattr("lit_rl.agents.worker._HEARTBEAT_S", 0.0)
    assert asyncio.run(first_item()) == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (asyncio.CancelledError(), "CancelledError"),
        (SystemExit(3), "SystemExit"),
        (TimeoutError("the judge is slow"), "the judge is slow"),
        ("not a trajectory", "FaultyLoop.run() must return a Trajectory, not str"),
    ],
)
def test_whatever_a_loop_does_fails_its_own_trajectory_only(runtime: Runtime, fault: object, message: str) -> None:
    path = f"{FaultyLoop.__module__}.{FaultyLoop.__qualname__}"
    spec = AgentLoopSpec(loop_class=path, options={"fault": fault})
    requests = [request("a", agent_name="faulty"), request("b")]
    trajectories = generate(runtime, EchoClient(), requests, agent_loops={"faulty": spec})
    assert message in (trajectories[0].error or "")
    assert "row-a" in (trajectories[0].error or "")
    assert trajectories[1].text == "b"


def test_special_tokens_and_untrained_tokens_are_not_in_the_text(runtime: Runtime) -> None:
    client = FixedClient(answer([10, 11, END, 12]))
    (trajectory,) = generate(runtime, client, [request("z")])
    assert trajectory.text == "ab"
    assert trajectory.loss_mask == [1, 1, 1, 0]


def test_worker_that_cannot_reach_a_reward_worker_reports_infrastructure(runtime: Runtime) -> None:
    class DeadReward:
        name = "reward-0"

        async def call(self, method: str, *args: object, timeout_s: float) -> None:
            raise WorkerDied("reward-0")

    async def run() -> Trajectory:
        worker = AgentLoopWorker(AgentSettings(), EchoClient(), letters(), [DeadReward()])  # type: ignore[list-item]
        return await worker.roll_out(request("a"), SamplingParams())

    trajectory = asyncio.run(run())
    assert (trajectory.error or "").startswith("infrastructure: row row-a: scoring failed")


@pytest.mark.parametrize(
    ("option", "value"),
    [("num_workers", 0), ("trajectory_timeout_s", 0), ("worker_timeout_s", 3), ("max_resubmissions", -1)],
)
def test_option_out_of_range_is_named(runtime: Runtime, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"data.agents.{option}={value}"):
        AgentLoopManager(runtime, AgentSettings(**{option: value}), EchoClient(), letters())  # type: ignore[arg-type]
