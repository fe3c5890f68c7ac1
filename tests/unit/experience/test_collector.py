"""Collecting with managers that answer at once: seeds, groups, failures, and the gate on the policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lit_rl.agents import TrajectoryRequest
from lit_rl.cluster import Runtime
from lit_rl.experience.batch import Experience
from lit_rl.experience.collector import Collector, derive_seed
from lit_rl.experience.progress import PhaseProgress
from lit_rl.experience.share import PlanSettings
from lit_rl.types import Prompt, SamplingParams, Trajectory

Answer = Callable[[TrajectoryRequest], dict[str, Any]]


class FakeAgents:
    """Answers every request with ``1 + sample_index`` tokens, changed by ``answer``."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[list[TrajectoryRequest]] = []
        self.sampling: list[SamplingParams] = []

    async def generate(
        self, requests: list[TrajectoryRequest], sampling: SamplingParams, *, on_finished: Callable[[Trajectory], None]
    ) -> list[Trajectory]:
        self.requests.append(requests)
        self.sampling.append(sampling)
        trajectories = []
        for request in requests:
            tokens = 1 + request.sample_index
            values = {
                "response_ids": [7] * tokens, "loss_mask": [1] * tokens, "rollout_logprobs": [-1.0] * tokens,
                "policy_versions": [0] * tokens, "reward": float(request.sample_index),
            }  # fmt: skip
            trajectories.append(
                Trajectory(
                    row_id=request.prompt.row_id,
                    group_id=request.group_id,
                    sample_index=request.sample_index,
                    prompt_ids=[1, 2, 3],
                    seed=request.seed,
                    **(values | self.answer(request)),
                )  # fmt: skip
            )
        for trajectory in reversed(trajectories):
            on_finished(trajectory)
        return trajectories


class FakeServers:
    """Holds one version."""

    def __init__(self) -> None:
        self.version = 0

    def require_version(self, version: int, iteration: int) -> None:
        if version != self.version:
            raise RuntimeError(f"replicas hold {self.version}, iteration {iteration} needs {version}")


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime("inline") as runtime:
        yield runtime


@pytest.fixture
def make_collector(runtime: Runtime) -> Callable[..., Collector]:
    def make(answer: Answer = lambda request: {}, seed: int = 1) -> Collector:
        agents: Any = FakeAgents(answer)
        servers: Any = FakeServers()
        return Collector(
            runtime=runtime, agents=agents, servers=servers, phase=PhaseProgress(), seed=seed, timeout_s=10.0
        )

    return make


def rows(*names: str) -> list[Prompt]:
    return [Prompt(row_id=name, messages=[], data_source="s") for name in names]


def collect(collector: Collector, iteration: int, *names: str, group_size: int = 3, **options: Any) -> Experience:
    """The experience of one rank."""
    collector.servers.version = iteration
    planned = {name: options.pop(name) for name in ("num_mini_batches", "max_tokens") if name in options}
    plan = PlanSettings(**({"max_tokens": 1000} | planned))
    rollout = collector.collect(
        iteration, rows(*names), SamplingParams(temperature=0.7), group_size=group_size, **options
    )
    (share,) = rollout.deal(plan, 1)
    return share.experience(plan, 1)


def seeds_of(collector: Collector) -> list[int]:
    return [request.seed for requests in collector.agents.requests for request in requests]


def test_seeds_repeat_with_the_run_and_differ_within_it(make_collector: Callable[..., Collector]) -> None:
    collectors = [make_collector(), make_collector(), make_collector(seed=2)]
    for collector in collectors:
        for iteration in range(3):
            # A small dataset may hold a row twice in one iteration.
            collect(collector, iteration, "a", "b", "a")
        collector.evaluate(rows("a", "b"), SamplingParams(), samples_per_row=2)

    seeds = seeds_of(collectors[0])
    assert seeds == seeds_of(collectors[1])
    assert len(set(seeds)) == len(seeds) == 3 * 9 + 4
    assert not set(seeds) & set(seeds_of(collectors[2]))
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_seed_is_the_same_on_every_machine() -> None:
    # `echo -n "(1, 'train', 0)" | sha256sum` begins with e3d13d04, which is twice this number or one more.
    assert derive_seed(1, "train", 0) == 1911070338
    assert len({derive_seed(1, "train", 0), derive_seed(1, "train", 1), derive_seed("1", "train", 0)}) == 3


def test_validation_asks_for_the_same_samples_every_time(make_collector: Callable[..., Collector]) -> None:
    collector = make_collector()
    for _ in range(2):
        trajectories = collector.evaluate(rows("a", "b"), SamplingParams(), samples_per_row=2)
        assert [(t.row_id, t.sample_index) for t in trajectories] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]

    assert seeds_of(collector)[:4] == seeds_of(collector)[4:]


def test_samples_of_a_row_share_a_group_and_a_row_drawn_twice_has_two(
    make_collector: Callable[..., Collector],
) -> None:
    collector = make_collector()
    experience = collect(collector, 0, "a", "b", "a", group_size=2)

    assert len({request.group_id for request in collector.agents.requests[0]}) == 3
    assert experience.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert [request.sample_index for request in collector.agents.requests[0]] == [0, 1] * 3
    later = collect(collector, 1, "a", group_size=2)
    assert later.trajectories[0].group_id not in {t.group_id for t in experience.trajectories}


def test_experience_holds_what_was_sampled(make_collector: Callable[..., Collector]) -> None:
    collector = make_collector()
    experience = collect(collector, 4, "a", "b", group_size=2)

    assert (experience.iteration, experience.temperature) == (4, 0.7)
    assert experience.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert experience.loss_tokens.tolist() == [1, 2, 1, 2]
    assert experience.indices == [0, 1, 2, 3]
    assert experience.plan.mini_batch(0, 0).num_loss_tokens == 6
    assert experience.metrics["critic/score/mean"] == 0.5
    assert experience.metrics["rollout/num_trajectories"] == 4
    assert "plan/max_micro_batch_tokens" in experience.metrics


# O28
def test_failed_trajectories_are_left_out_and_counted(make_collector: Callable[..., Collector]) -> None:
    def answer(request: TrajectoryRequest) -> dict[str, Any]:
        if (request.prompt.row_id, request.sample_index) == ("a", 1):
            return {"error": "raised", "reward": 100.0}
        return {"reward": None} if request.prompt.row_id == "b" else {}

    collector = make_collector(answer)
    experience = collect(collector, 0, "a", "b", "c", group_size=3)

    assert experience.rewards.tolist() == [0.0, 2.0, 0.0, 1.0, 2.0]
    # Groups are numbered densely: the one whose every trajectory failed is gone.
    assert experience.group_ids.tolist() == [0, 0, 1, 1, 1]
    assert experience.metrics["rollout/failed_share"] == pytest.approx(4 / 9)
    assert experience.metrics["critic/score/mean"] == 1.0
    assert len(experience) == 5
    # For logs, all of them.
    assert len(collector.last_trajectories) == 9


def test_an_iteration_in_which_everything_failed_has_no_experience(make_collector: Callable[..., Collector]) -> None:
    experience = collect(make_collector(lambda request: {"error": "raised"}), 0, "a", num_mini_batches=2)

    assert len(experience) == 0
    assert experience.rewards.shape == (0,)
    assert [mini.num_loss_tokens for mini in experience.plan.mini_batches[0]] == [0, 0]
    assert experience.metrics["rollout/failed_share"] == 1.0


# O41
def test_nothing_is_collected_before_the_replicas_hold_the_iterations_version(
    make_collector: Callable[..., Collector],
) -> None:
    collector = make_collector()
    with pytest.raises(RuntimeError, match="replicas hold 0, iteration 1 needs 1"):
        collector.collect(1, rows("a"), SamplingParams(), group_size=1)

    assert collector.agents.requests == []


def test_the_same_trajectories_are_planned_the_same_way(make_collector: Callable[..., Collector]) -> None:
    plans = [collect(make_collector(), 3, "a", "b", "c", "d", num_mini_batches=2, max_tokens=20).plan for _ in range(2)]

    assert plans[0] == plans[1]


def test_a_broken_trajectory_is_named(make_collector: Callable[..., Collector]) -> None:
    collector = make_collector(lambda request: {"loss_mask": [1, 1, 1, 1]})

    with pytest.raises(ValueError, match="Trajectory of row a: per-token lists differ in length"):
        collect(collector, 0, "a")


def test_progress_counts_trajectories_and_tokens(make_collector: Callable[..., Collector]) -> None:
    collector = make_collector()
    collect(collector, 0, "a", "b", group_size=3)
    phase = collector.phase

    assert (phase.phase, phase.done, phase.total, phase.tokens) == ("rollout", 6, 6, 12)
    collector.evaluate(rows("a"), SamplingParams(), samples_per_row=1)
    assert (phase.phase, phase.done, phase.total, phase.tokens) == ("validation", 1, 1, 1)


def test_a_rollout_that_takes_too_long_says_so(runtime: Runtime) -> None:
    class Hanging(FakeAgents):
        async def generate(self, *args: Any, **kwargs: Any) -> list[Trajectory]:
            await asyncio.sleep(60)
            return []

    agents: Any = Hanging(lambda request: {})
    servers: Any = FakeServers()
    collector = Collector(runtime=runtime, agents=agents, servers=servers, phase=PhaseProgress(), seed=0, timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"Timed out after 0.1 s: rollout of 3 trajectories"):
        collect(collector, 0, "a")


def test_a_greedy_trajectory_per_row_gives_the_baseline_and_is_not_learnt_from(
    make_collector: Callable[..., Collector],
) -> None:
    def answer(request: TrajectoryRequest) -> dict[str, Any]:
        is_greedy = request.sample_index == 2
        if request.prompt.row_id == "b" and is_greedy:
            return {"error": "no answer", "reward": None}
        return {"reward": 5.0} if is_greedy else {}

    collector = make_collector(answer)
    experience = collect(collector, 0, "a", "b", group_size=2, greedy_baseline=True)

    assert len(experience) == 4
    assert experience.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert experience.greedy_rewards is not None
    assert experience.greedy_rewards[:2].tolist() == [5.0, 5.0]
    assert experience.greedy_rewards[2:].isnan().all()
    assert sorted(sampling.temperature for sampling in collector.agents.sampling) == [0.0, 0.7]
    assert len(set(seeds_of(collector))) == 6
    assert len(collector.last_trajectories) == 4


def test_groups_without_spread_are_replaced_and_metrics_cover_all_that_was_sampled(
    make_collector: Callable[..., Collector],
) -> None:
    fresh = iter(rows("c", "d"))
    collector = make_collector(lambda request: {"reward": 1.0} if request.prompt.row_id in "ac" else {})
    experience = collect(
        collector, 0, "a", "b", group_size=2, dynamic_sampling_rounds=3, next_rows=lambda num: [next(fresh)]
    )

    assert [trajectory.row_id for trajectory in experience.trajectories] == ["b", "b", "d", "d"]
    assert [len(requests) for requests in collector.agents.requests] == [4, 2, 2]
    assert experience.metrics["rollout/num_trajectories"] == 8.0
    assert experience.metrics["rollout/dynamic_sampling/rounds"] == 2.0
    assert len(set(seeds_of(collector))) == 8


def test_a_branch_is_trained_with_its_samples_reward_and_group(make_collector: Callable[..., Collector]) -> None:
    def answer(request: TrajectoryRequest) -> dict[str, Any]:
        branch = Trajectory(
            row_id="a", group_id=request.group_id, prompt_ids=[1, 2, 3, 7, 9], response_ids=[4, 4], loss_mask=[1, 1],
            rollout_logprobs=[-1.0] * 2, policy_versions=[0, 0], reward=float(request.sample_index),
        )  # fmt: skip
        return {"branches": [branch]} if request.sample_index == 1 else {}

    collector = make_collector(answer)
    experience = collect(collector, 0, "a")  # its prompt differs from the group's, which share_prompts must bear

    assert experience.rewards.tolist() == [0.0, 1.0, 1.0, 2.0]
    assert experience.group_ids.tolist() == [0, 0, 0, 0]
    assert [len(trajectory.prompt_ids) for trajectory in experience.trajectories] == [3, 3, 5, 3]
    assert len(collector.last_trajectories) == 3
