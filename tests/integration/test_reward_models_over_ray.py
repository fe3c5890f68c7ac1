"""A reward model in processes of its own: a killed replica loses no score, and nothing is left after the stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_classifier import save_tiny_classifier, tiny_score

from lit_rl.cluster import Runtime
from lit_rl.rewards import RewardLoopManager, RewardModelSettings, RewardSettings
from lit_rl.serving import ServingSettings
from lit_rl.types import Prompt, Trajectory

pytestmark = pytest.mark.usefixtures("nothing_left")

QUESTION = [{"role": "user", "content": "Say a number."}]


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with Runtime("ray", num_cpus=2) as started:
        yield started


def test_a_classifier_scores_in_processes_while_a_replica_is_killed(runtime: Runtime, tmp_path: Path) -> None:
    folder = save_tiny_classifier(tmp_path)
    model = RewardModelSettings(
        model_name=folder,
        kind="classifier",
        max_model_len=64,
        serving=ServingSettings(replica="transformers", dtype="float32", num_replicas=2, threads_per_replica=1),
    )
    settings = RewardSettings(
        function="lit_rl.rewards.reward_model:compute_score",
        kwargs={"model": "rm"},
        models={"rm": model},
        num_workers=1,
        timeout_s=120.0,
    )
    manager = RewardLoopManager(runtime, settings)
    trajectories = [trajectory(str(number)) for number in range(12)]
    runtime.loop.run(score_and_kill(manager, trajectories), timeout_s=300, what="the scores")
    assert [trajectory.error for trajectory in trajectories] == [None] * 12
    expected = [tiny_score(folder, [*QUESTION, {"role": "assistant", "content": str(n)}]) for n in range(12)]
    assert [trajectory.reward for trajectory in trajectories] == pytest.approx(expected, abs=1e-5)


@pytest.mark.engine
def test_vllm_serves_a_classifier_with_the_same_scores(runtime: Runtime, tmp_path: Path) -> None:
    folder = save_tiny_classifier(tmp_path)
    serving = ServingSettings(dtype="float32", threads_per_replica=1, kv_cache_gib=0.1)
    model = RewardModelSettings(model_name=folder, kind="classifier", max_model_len=64, serving=serving)
    function = "lit_rl.rewards.reward_model:compute_score"
    settings = RewardSettings(function=function, kwargs={"model": "rm"}, models={"rm": model}, num_workers=1)
    manager = RewardLoopManager(runtime, settings)
    trajectories = [trajectory(str(number)) for number in range(6)]

    async def score() -> None:
        try:
            await manager.start()
            prompts = [Prompt(row_id="r", messages=list(QUESTION), data_source="test")] * 6
            await manager.score_batch(prompts, trajectories)
        finally:
            await manager.stop()

    runtime.loop.run(score(), timeout_s=500, what="the scores")
    assert [trajectory.error for trajectory in trajectories] == [None] * 6
    expected = [tiny_score(folder, [*QUESTION, {"role": "assistant", "content": str(n)}]) for n in range(6)]
    assert [trajectory.reward for trajectory in trajectories] == pytest.approx(expected, abs=1e-4)


async def score_and_kill(manager: RewardLoopManager, trajectories: list[Trajectory]) -> None:
    prompts = [Prompt(row_id="r", messages=list(QUESTION), data_source="test")] * len(trajectories)
    try:
        await manager.start()
        await manager.score_batch(prompts[:2], trajectories[:2])
        replicas = manager._servers._managers["rm"].replicas
        assert replicas is not None
        pid = (await replicas.workers[0]._identity).pid  # type: ignore[attr-defined]
        scoring = asyncio.ensure_future(manager.score_batch(prompts[2:], trajectories[2:]))
        os.kill(pid, signal.SIGKILL)
        await scoring
    finally:
        await manager.stop()


def trajectory(text: str) -> Trajectory:
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
