"""Checkpoints of several ranks: what is resumed equals what was never interrupted, on as many ranks or on others."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from rank_updates import Case, rollout_of, update
from ranks import run_on_ranks

from lit_rl.experience.share import PlanSettings
from lit_rl.strategies import DeepSpeedStrategy, FSDP2Strategy

NUM_ITERATIONS, SAVED = 4, 2


@pytest.fixture(scope="module")
def case_of(tiny_model_folder, make_trajectories):
    def make(**changes):
        options = {"model_name": tiny_model_folder, "actor_lr": 1e-3, "adam_eps": 1e-3}
        rollouts = [rollout_of(make_trajectories(seed=seed), seed) for seed in range(NUM_ITERATIONS)]
        return Case(
            module="GRPO", options=options, rollouts=rollouts, settings=PlanSettings(max_tokens=48), **changes
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def uninterrupted(case_of):
    (outcome,) = update([case_of()])
    return outcome


STRATEGIES = {
    "ddp": "ddp",
    "fsdp2": FSDP2Strategy,
    "fsdp2, one file": functools.partial(FSDP2Strategy, save_full_checkpoint=True),
    "zero-2": functools.partial(DeepSpeedStrategy, stage=2),
    "zero-3": functools.partial(DeepSpeedStrategy, stage=3),
}


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("ddp", [1]),
        ("fsdp2", [3]),
        pytest.param("fsdp2, one file", [], marks=pytest.mark.slow),
        ("zero-2", []),
        pytest.param("zero-3", [], marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(case_of, uninterrupted, tmp_path, name, others):
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    strategy = STRATEGIES[name]
    checkpoint = str(tmp_path / "iteration_00001.ckpt")
    first = case_of(iterations=SAVED, save_in=str(tmp_path))
    # In one start of processes: a second fit begins anew, and reads what the first has written.
    ranks = run_on_ranks(update, 2, [first, case_of(resume=checkpoint)], strategy)
    for _, resumed in ranks:
        assert len(resumed.metrics) == NUM_ITERATIONS - SAVED
        assert_equal(resumed, uninterrupted)
    assert (tmp_path / "last.ckpt").resolve() == Path(checkpoint)
    assert list(tmp_path.glob("*.partial")) == []
    for world_size in others:
        case = case_of(resume=checkpoint)
        ranks = [update([case])] if world_size == 1 else run_on_ranks(update, world_size, [case], strategy)
        for (resumed,) in ranks:
            assert_equal(resumed, uninterrupted)


def assert_equal(left, right):
    assert left.global_step == right.global_step
    for name, tensor in right.weights.items():
        assert (left.weights[name] - tensor).norm() <= 1e-6 * tensor.norm(), name
