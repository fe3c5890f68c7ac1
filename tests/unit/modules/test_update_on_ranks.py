"""One update on one rank and on several, under every strategy: the same gradients, weights and numbers."""

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
from lit_rl.strategies import DeepSpeedStrategy, FSDP2Strategy

LR, EPS = 1e-3, 1e-3  # see test_update_against_oracle.py
OPTIONS = {"actor_lr": LR, "adam_eps": EPS, "max_grad_norm": 1e9}
NUMBERS = {"actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "critic/vf_loss"}
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


STRATEGIES = {
    "ddp": "ddp",
    "fsdp2": FSDP2Strategy,
    "zero-1": functools.partial(DeepSpeedStrategy, stage=1),
    "zero-2": functools.partial(DeepSpeedStrategy, stage=2),
    "zero-3": functools.partial(DeepSpeedStrategy, stage=3),
}
# Without "fixed", which says nothing more of a strategy, and "not finite", which the engine leaves to itself.
ZERO_CASES = ("token-mean, dynamic", "mini-batches", "few", "equal", "ppo", "ppo warm-up", "token advantages")
PLACES = [
    ("ddp", 2),
    ("ddp", 3),
    ("fsdp2", 2),
    pytest.param(("fsdp2", 3), marks=pytest.mark.slow),
    pytest.param(("zero-1", 2), marks=pytest.mark.slow),
    ("zero-2", 2),
    pytest.param(("zero-3", 2), marks=pytest.mark.slow),
]


@pytest.fixture(scope="session")
def alone(cases):
    """What one rank does, by case."""
    return dict(zip(cases, update(list(cases.values())), strict=True))


@pytest.fixture(scope="session", params=PLACES, ids=lambda place: f"{place[0]} {place[1]}")
def ranks(request, cases):
    """What each rank of several does, by case; one start of processes."""
    strategy, world_size = request.param
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    names = ZERO_CASES if strategy.startswith("zero") else cases
    found = run_on_ranks(update, world_size, [cases[name] for name in names], STRATEGIES[strategy])
    return [dict(zip(names, outcomes, strict=True)) for outcomes in found]


def skip_unless(ranks, name):
    if name not in ranks[0]:
        pytest.skip("not run under this strategy")


def assert_close(left, right, tolerance=1e-6):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor - right[name]).norm() <= tolerance * max(right[name].norm(), 1e-12), name


@pytest.mark.parametrize("micro_batches", ["dynamic", "fixed"])
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_gradients_do_not_depend_on_the_number_of_ranks(ranks, alone, mode, micro_batches):
    name = f"{mode}, {micro_batches}"
    skip_unless(ranks, name)
    if not ranks[0][name].gradients:
        pytest.skip("DeepSpeed's gradients are its own; its weights are compared")
    (expected,) = alone[name].gradients

    for rank in ranks:
        (gradients,) = rank[name].gradients
        assert_close(gradients, expected)
    assert sum(rank[name].num_held for rank in ranks) == alone[name].num_held == 20


@pytest.mark.parametrize(
    "name",
    ["token-mean, dynamic", "kl and entropy", "few", "one group with spread", "ppo", "ppo warm-up", "token advantages"],
)
def test_weights_and_numbers_do_not_depend_on_the_number_of_ranks(ranks, alone, name):
    skip_unless(ranks, name)
    for rank in ranks:
        assert_close(rank[name].weights, alone[name].weights)
        for metrics, expected in zip(rank[name].metrics, alone[name].metrics, strict=True):
            if "joint/grad_norm" not in metrics:
                assert metrics.keys() == expected.keys()
            for key in {"actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl", "critic/vf_loss"} & {
                *metrics
            }:
                assert metrics[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-7), key


def test_several_steps_equal_the_float64_oracle(ranks, cases, tiny_model_folder):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64).eval()
    # Which trajectories share a mini-batch depends on the number of ranks.
    mini_batches = ranks[0]["mini-batches"].mini_batches
    assert len(mini_batches) == 4
    (rollout,) = cases["mini-batches"].rollouts
    expected = oracle_weights(model, rollout.sequences, mini_batches, lr=LR, eps=EPS, temperature=1.0, clip=(0.2, 0.2))

    for rank in ranks:
        assert_close(rank["mini-batches"].weights, {f"actor.{name}": tensor for name, tensor in expected.items()})


def test_all_ranks_log_the_same(ranks):
    for name in ranks[0]:
        for first, *others in zip(*(rank[name].metrics for rank in ranks), strict=True):
            assert others == [first] * len(others), name


def test_a_mini_batch_without_weight_is_skipped_by_all(ranks, alone):
    for rank in [alone, *ranks]:
        assert rank["equal"].global_step == 0
        assert rank["equal"].metrics[0]["actor/skipped_weightless_steps"] == 1.0


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(ranks, alone):
    skip_unless(ranks, "not finite")
    for rank in [alone, *ranks]:
        found = rank["not finite"]
        assert found.metrics[0]["actor/skipped_not_finite_steps"] == 1.0
        assert found.global_step == 1
        assert_close(found.weights, alone["not finite"].weights)
        assert all(tensor.isfinite().all() for tensor in found.weights.values())


def test_warm_up_leaves_the_actor_alone(ranks, alone):
    start = alone["equal"].weights  # never stepped
    for rank in ranks:
        before, after = rank["ppo warm-up"].weights_by_iteration
        for name, tensor in start.items():
            assert torch.equal(before[name], tensor), name
            assert not torch.equal(after[name], tensor), name


def test_weights_come_out_whole_under_hugging_face_names(ranks, tiny_model_folder):
    network = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    expected = {f"actor.{name}": parameter.shape for name, parameter in network.named_parameters()}

    for rank in ranks:
        found = rank["few"]
        assert {name: tensor.shape for name, tensor in found.weights.items()} == expected
        # A bucket holds at most BUCKET_BYTES, or one larger tensor.
        assert found.largest_bucket == max(4 * shape.numel() for shape in expected.values())
        assert found.num_buckets > 3
