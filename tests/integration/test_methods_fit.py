"""Methods through the real parts: every overlay, and what needs more than one group-relative rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny_fit import MODEL, spread_reward, tiny_data, tiny_fit

from lit_rl import modules
from lit_rl.callbacks import IterationCheckpoint
from lit_rl.models import load_causal_lm
from lit_rl.modules import DAPO, PPO, ReMax
from lit_rl.rewards import OverlongShaping, RewardSettings

pytestmark = pytest.mark.usefixtures("nothing_left")

# A teacher of its own is served by an engine: test_distillation_fit.py trains with one.
OVERLAYS = sorted(
    overlay
    for overlay in (Path(__file__).parents[2] / "configs/algorithms").glob("*.yaml")
    if overlay.stem != "distillation"
)


def reward_in_parts(solution_str: str, ground_truth: str) -> dict[str, float]:
    score = spread_reward(solution_str, ground_truth)
    return {"score": score, "acc": score, "complete": float(len(solution_str) % 2)}


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_trains_through_the_real_parts(overlay: Path) -> None:
    config = yaml.safe_load(overlay.read_text())
    name, options = config["model"]["class_path"].rpartition(".")[2], config["model"].get("init_args", {})
    if "critic_warmup_iterations" in options:
        options["critic_warmup_iterations"] = 0
    data: dict[str, Any] = config.get("data", {}).get("init_args", {})
    overlong = data.pop("rewards", {}).get("overlong")
    rewards = RewardSettings(
        function=reward_in_parts, num_workers=1, overlong=OverlongShaping(**overlong) if overlong else None
    )
    module = getattr(modules, name)(MODEL, **{**options, "actor_lr": 1e-3})
    run = tiny_fit(1, module=module, data=tiny_data(rewards=rewards, **data)).fit()

    assert run.trainer.global_step == data.get("num_mini_batches", 1) * data.get("ppo_epochs", 1)
    (skipped,) = [value for _, value in run.logger.column("actor/skipped_not_finite_steps")] or [0.0]
    assert skipped == 0.0
    start = load_causal_lm(MODEL).state_dict()
    moved = {key: tensor for key, tensor in module.actor.network.state_dict().items() if not tensor.equal(start[key])}
    assert moved
    assert all(tensor.isfinite().all() for tensor in moved.values())


def ppo() -> PPO:
    return PPO(
        MODEL, actor_lr=1e-3, critic_lr=1e-3, critic_warmup_iterations=1, kl_reward_coef=0.1, kl_reward_target=0.01,
        kl_reward_horizon=20,
    )  # fmt: skip


def test_a_resumed_ppo_run_equals_the_uninterrupted_one(tmp_path) -> None:
    keep_all = IterationCheckpoint(dirpath=str(tmp_path), keep=-1)
    whole = tiny_fit(3, module=ppo(), data=tiny_data(num_mini_batches=2), callbacks=[keep_all]).fit()
    resumed = tiny_fit(3, module=ppo(), data=tiny_data(num_mini_batches=2))
    # The first iteration only warmed the critic up: the actor has no moments in this checkpoint.
    resumed.fit(ckpt_path=str(tmp_path / "iteration_00000.ckpt"))

    assert whole.trainer.global_step == resumed.trainer.global_step == 6
    weights, expected = resumed.weights(), whole.weights()
    assert {name.partition(".")[0] for name in expected} == {"actor", "critic"}
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    coefficients = [value for _, value in whole.logger.column("actor/reward_kl_penalty_coeff")]
    assert coefficients[0] == pytest.approx(0.1)
    assert coefficients[2] == [value for _, value in resumed.logger.column("actor/reward_kl_penalty_coeff")][1]
    assert coefficients[1] != coefficients[0]


def test_remax_learns_from_sampled_answers_against_a_greedy_one() -> None:
    run = tiny_fit(2, module=ReMax(MODEL, actor_lr=1e-3), data=tiny_data(greedy_baseline=True, group_size=2)).fit()

    assert [len(trajectories) for trajectories in run.iterations] == [4, 4]
    assert run.trainer.global_step == 2


def test_remax_without_greedy_answers_is_refused_before_anything_starts() -> None:
    run = tiny_fit(1, module=ReMax(MODEL))

    with pytest.raises(ValueError, match=r"Set data\.greedy_baseline=true"):
        run.fit()

    with pytest.raises(RuntimeError, match="between setup and teardown"):
        _ = run.data.runtime


def test_dapo_takes_fresh_prompts_for_groups_of_equal_rewards() -> None:
    def only_short_numbers_differ(solution_str: str, ground_truth: str) -> float:
        return sum(solution_str.encode()) % 5 / 4 if len(ground_truth) == 1 else 1.0

    data = tiny_data(only_short_numbers_differ, dynamic_sampling_rounds=4)
    run = tiny_fit(2, module=DAPO(MODEL, actor_lr=1e-3), data=data).fit()

    groups = [value for _, value in run.logger.column("rollout/dynamic_sampling/num_groups")]
    sampled = [len(trajectories) for trajectories in run.iterations]
    assert sampled == [4 * int(count) for count in groups]
    assert max(groups) > 2
    # What was replaced is in no gradient: every group that is left has spread.
    assert [value for _, value in run.logger.column("critic/zero_spread_group_share")] == [0.0, 0.0]
