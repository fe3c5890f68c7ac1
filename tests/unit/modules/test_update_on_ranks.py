"""One update on one, two and three DDP ranks: the same gradients, weights and numbers."""

from __future__ import annotations

import functools

import pytest
import torch
from grpo_oracle import oracle_weights
from rank_updates import Case, rollout_of, update
from ranks import run_on_ranks
from transformers import AutoModelForCausalLM

from lit_rl.algorithms.aggregate import AGGREGATION_MODES
from lit_rl.experience.share import PlanSettings

LR, EPS = 1e-3, 1e-3  # see test_update_against_oracle.py
OPTIONS = {"actor_lr": LR, "adam_eps": EPS, "max_grad_norm": 1e9}
DYNAMIC = PlanSettings(max_tokens=40)
FIXED = PlanSettings(max_tokens=400, micro_batch_size=2, share_prompts=False)


@pytest.fixture(scope="session")
def cases(tiny_model_folder, make_trajectories):
    """By name; trajectories have tool tokens in between and one empty response, and groups of unequal length."""

    def grpo(settings, trajectories=None, **options):
        given = trajectories or make_trajectories()
        return Case(
            module="GRPO", options={"model_name": tiny_model_folder, "clip_ratio_c": None, **OPTIONS, **options},
            rollouts=[rollout_of(given)], settings=settings,
        )  # fmt: skip

    found = {}
    for mode in AGGREGATION_MODES:
        scale = {"loss_scale": 14.0} if mode == "seq-mean-token-sum-norm" else {}
        found[f"{mode}, dynamic"] = grpo(DYNAMIC, loss_agg_mode=mode, **scale)
        found[f"{mode}, fixed"] = grpo(FIXED, loss_agg_mode=mode, **scale)
    found["kl and entropy"] = grpo(DYNAMIC, kl_loss_coef=0.3, entropy_coef=0.1)
    found["mini-batches"] = grpo(PlanSettings(max_tokens=48, num_mini_batches=2, ppo_epochs=2), max_grad_norm=1.0)
    found["few"] = grpo(DYNAMIC, make_trajectories(num_groups=1, group_size=2))
    found["equal"] = grpo(DYNAMIC, make_trajectories(rewards=[1.0] * 20))
    half = [1.0] * 4 + [0.0, 1.0, 0.0, 1.0] + [0.0] * 12
    found["one group with spread"] = grpo(DYNAMIC, make_trajectories(rewards=half))
    ppo = {"critic_lr": 2e-3, "gamma": 0.9, "lam": 0.8, "critic_max_grad_norm": 1e9, "kl_reward_coef": 0.1}
    for name, warmup in (("ppo", 0), ("ppo warm-up", 1)):
        found[name] = Case(
            module="PPO", settings=PlanSettings(max_tokens=48),
            options={"model_name": tiny_model_folder, **OPTIONS, **ppo, "critic_warmup_iterations": warmup},
            rollouts=[rollout_of(make_trajectories(seed=seed), seed) for seed in range(2)],
        )  # fmt: skip
    found["token advantages"] = Case(
        module="ReinforcePlusPlus", settings=DYNAMIC, options={"model_name": tiny_model_folder, **OPTIONS},
        rollouts=[rollout_of(make_trajectories())],
    )  # fmt: skip
    found["not finite"] = Case(
        module="GRPO", options={"model_name": tiny_model_folder, **OPTIONS}, settings=DYNAMIC,
        rollouts=[rollout_of(make_trajectories(), iteration) for iteration in range(2)], poison=(0, float("nan")),
    )  # fmt: skip
    return found


@pytest.fixture(scope="session")
def outcomes(cases):
    """``[world_size][rank][case]``, one start of processes per number of ranks."""

    @functools.cache
    def run(world_size, rank):
        return all_ranks(world_size)[rank]

    @functools.cache
    def all_ranks(world_size):
        given = list(cases.values())
        if world_size == 1:
            return [dict(zip(cases, update(given), strict=True))]
        ranks = run_on_ranks(update, world_size, given, "ddp")
        return [dict(zip(cases, outcomes, strict=True)) for outcomes in ranks]

    return run


def assert_close(left, right, tolerance=1e-6):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor - right[name]).norm() <= tolerance * max(right[name].norm(), 1e-12), name


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("micro_batches", ["dynamic", "fixed"])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_gradients_do_not_depend_on_the_number_of_ranks(outcomes, mode, micro_batches, world_size):
    name = f"{mode}, {micro_batches}"
    (alone,) = outcomes(1, 0)[name].gradients

    for rank in range(world_size):
        (gradients,) = outcomes(world_size, rank)[name].gradients
        assert_close(gradients, alone)
    assert sum(outcomes(world_size, rank)[name].num_held for rank in range(world_size)) == 20


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["kl and entropy", "few", "one group with spread", "ppo", "token advantages"])
def test_weights_and_numbers_do_not_depend_on_the_number_of_ranks(outcomes, name, world_size):
    alone = outcomes(1, 0)[name]

    for rank in range(world_size):
        found = outcomes(world_size, rank)[name]
        assert_close(found.weights, alone.weights)
        for metrics, expected in zip(found.metrics, alone.metrics, strict=True):
            assert metrics.keys() == expected.keys()
            for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "critic/vf_loss"):
                assert metrics.get(key, 0.0) == pytest.approx(expected.get(key, 0.0), rel=1e-4, abs=1e-7), key


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_steps_equal_the_float64_oracle(outcomes, cases, tiny_model_folder, world_size):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64).eval()
    found = outcomes(world_size, 0)["mini-batches"]
    assert len(found.mini_batches) == 4
    (rollout,) = cases["mini-batches"].rollouts
    expected = oracle_weights(
        model, rollout.sequences, found.mini_batches, lr=LR, eps=EPS, temperature=1.0, clip=(0.2, 0.2)
    )

    assert_close(found.weights, {f"actor.{name}": tensor for name, tensor in expected.items()})


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_log_the_same(outcomes, cases, world_size):
    for name in cases:
        iterations = [outcomes(world_size, rank)[name].metrics for rank in range(world_size)]
        for first, *others in zip(*iterations, strict=True):
            assert others == [first] * (world_size - 1), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mini_batch_without_weight_is_skipped_by_all(outcomes, world_size):
    for rank in range(world_size):
        found = outcomes(world_size, rank)["equal"]
        assert found.gradients == []
        assert found.metrics[0]["actor/skipped_weightless_steps"] == 1.0


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(outcomes, world_size):
    for rank in range(world_size):
        found = outcomes(world_size, rank)["not finite"]
        assert found.metrics[0]["actor/skipped_not_finite_steps"] == 1.0
        assert found.global_step == 1
        assert all(tensor.isfinite().all() for tensor in found.weights.values())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_warm_up_leaves_the_actor_alone(outcomes, world_size):
    found = outcomes(world_size, world_size - 1)["ppo warm-up"]
    before, after = found.weights_by_iteration
    start = outcomes(world_size, 0)["equal"].weights

    for name, tensor in start.items():
        assert torch.equal(before[name], tensor), name
        assert not torch.equal(after[name], tensor), name
    assert any(name.startswith("critic.") for name in before)
