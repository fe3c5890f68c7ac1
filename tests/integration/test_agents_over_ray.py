from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lit_rl.agents import AgentLoopManager, AgentSettings, TrajectoryRequest
from lit_rl.agents.policy_text import PolicyText
from lit_rl.cluster import Runtime
from lit_rl.rewards import RewardLoopManager, RewardSettings
from lit_rl.types import Prompt, SamplingParams, TokenOutput, Trajectory

USER_REWARD = """
import os

def my_reward(solution_str, ground_truth, bonus=0.0):
    return {"score": float(solution_str == ground_truth) + bonus, "pid": os.getpid()}
"""


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime("ray", num_cpus=2) as started:
        yield started


def test_file_reward_scores_in_workers_while_an_agent_worker_is_killed(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # O49, and D12: a killed worker loses nothing
    (tmp_path / "user_rewards.py").write_text(USER_REWARD)
    monkeypatch.chdir(tmp_path)
    settings = RewardSettings(function="user_rewards.py:my_reward", kwargs={"bonus": 0.5}, num_workers=1)
    rewards = RewardLoopManager(runtime, settings)
    monkeypatch.chdir("/")
    trajectories = runtime.loop.run(_roll_out(runtime, rewards, tmp_path / "pids"), timeout_s=120, what="the rollout")
    assert [trajectory.text for trajectory in trajectories] == [str(number) for number in range(8)]
    assert [trajectory.reward for trajectory in trajectories] == [1.5] * 7 + [0.5]
    assert max(trajectory.metrics["num_resubmitted"] for trajectory in trajectories) >= 1
    assert {trajectory.reward_parts["pid"] for trajectory in trajectories}.isdisjoint({os.getpid()})


async def _roll_out(runtime: Runtime, rewards: RewardLoopManager, pids: Path) -> list[Trajectory]:
    await rewards.start()
    client, text = _client_and_text(pids)
    manager = AgentLoopManager(runtime, AgentSettings(num_workers=2), client, text, rewards.handles)
    await manager.start()
    requests = [
        TrajectoryRequest(
            prompt=Prompt(
                row_id=str(number),
                messages=[],
                data_source="test",
                ground_truth=str(number) if number < 7 else "other",
                prompt_ids=[100 + number],
            ),
            group_id="g",
        )
        for number in range(8)
    ]
    rollout = asyncio.create_task(manager.generate(requests, SamplingParams()))
    while not (pids.exists() and pids.read_text().strip()):  # bounded by the timeout of the whole
        await asyncio.sleep(0.1)
    os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
    trajectories = await rollout
    await manager.stop()
    await rewards.stop()
    return trajectories


def _client_and_text(pids: Path) -> tuple[object, PolicyText]:
    # Inside a function, so that Ray sends the classes by value: workers cannot import this test.
    class SlowClient:
        async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
            with pids.open("a") as file:
                file.write(f"{os.getpid()}\n")
            await asyncio.sleep(1.0)
            return TokenOutput(token_ids=prompt_ids, logprobs=[-1.0], stop_reason="stop", policy_versions=[0])

    class NumberTokenizer:
        eos_token_id = 2

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return str(token_ids[0] - 100)

    return SlowClient(), PolicyText(tokenizer=NumberTokenizer(), chat_template=None, end_token_ids=frozenset({2}))


def test_a_killed_reward_worker_starts_again_and_no_score_is_lost(runtime: Runtime, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def slow(solution_str: str) -> dict[str, float]:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        await asyncio.sleep(1.0)
        return {"score": float(len(solution_str)), "pid": os.getpid()}

    manager = RewardLoopManager(runtime, RewardSettings(function=slow, num_workers=1))
    trajectories = [_finished("a" * number) for number in range(1, 5)]

    async def score_and_kill() -> None:
        await manager.start()
        prompts = [Prompt(row_id="r", messages=[], data_source="test")] * len(trajectories)
        scoring = asyncio.create_task(manager.score_batch(prompts, trajectories))
        while not (pids.exists() and pids.read_text().strip()):
            await asyncio.sleep(0.1)
        os.kill(int(pids.read_text().split()[0]), signal.SIGKILL)
        await scoring
        await manager.stop()

    runtime.loop.run(score_and_kill(), timeout_s=120, what="the scores")
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 2.0, 3.0, 4.0]
    first = int(pids.read_text().split()[0])
    assert {trajectory.reward_parts["pid"] for trajectory in trajectories}.isdisjoint({first})


def _finished(text: str) -> Trajectory:
    return Trajectory(
        row_id="r",
        group_id="g",
        prompt_ids=[],
        response_ids=[1],
        loss_mask=[1],
        rollout_logprobs=[0.0],
        policy_versions=[0],
        text=text,
    )
