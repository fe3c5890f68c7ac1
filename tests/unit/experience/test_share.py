"""Shares of an iteration: every sequence on one rank, the same scalars and the same plan on all, compact on the way."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
import torch

from lit_rl.experience.evaluation import EvaluationBatch
from lit_rl.experience.flat import FlatTrajectories
from lit_rl.experience.share import ExperienceShare, PlanSettings, Rollout, SequenceScalars
from lit_rl.types import Trajectory

SETTINGS = PlanSettings(max_tokens=60, num_mini_batches=2, ppo_epochs=2)


def trajectory(number: int, group_size: int = 3) -> Trajectory:
    rng = random.Random(number)
    length = 0 if number == 4 else rng.randint(1, 12)
    mask = [int(column % 4 != 3) for column in range(length)]
    return Trajectory(
        row_id=f"row {number // group_size}", group_id=f"g{number // group_size}", sample_index=number % group_size,
        data_source="s", prompt_ids=[number // group_size] * (1 + number // group_size),
        response_ids=[rng.randrange(50_000, 150_000) for _ in mask], loss_mask=mask,
        rollout_logprobs=[-0.1 * column for column in range(length)],
        policy_versions=[3 if one else -1 for one in mask],
        reward=float(number), reward_parts={"format": 1.0}, stop_reason="length", num_turns=4, seed=number,
        text=f"text {number}", messages=[{"role": "assistant", "content": "a"}], media={"image": ["picture"]},
    )  # fmt: skip


@pytest.fixture
def make_rollout() -> Callable[[int], Rollout]:
    def make(size: int) -> Rollout:
        sequences = [trajectory(number) for number in range(size)]
        groups = [number // 3 for number in range(size)]
        scalars = SequenceScalars(
            iteration=5, temperature=0.7, plan_seed=11, lengths=[t.length for t in sequences],
            prompt_lengths=[len(t.prompt_ids) for t in sequences], loss_tokens=[t.num_loss_tokens for t in sequences],
            rewards=[float(t.reward or 0.0) for t in sequences], group_ids=groups, prompt_groups=groups,
            greedy_rewards=[0.5] * size, metrics={"critic/score/mean": 1.0},
        )  # fmt: skip
        return Rollout(scalars=scalars, sequences=sequences)

    return make


def sent(share: ExperienceShare) -> ExperienceShare:
    """As it arrives elsewhere."""
    copy: ExperienceShare = pickle.loads(pickle.dumps(share))
    return copy


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 5, 12])
def test_every_sequence_is_on_one_rank_and_the_scalars_are_on_all(
    make_rollout: Callable[[int], Rollout], size: int, world_size: int
) -> None:
    rollout = make_rollout(size)
    experiences = [sent(share).experience(SETTINGS, world_size) for share in rollout.deal(SETTINGS, world_size)]

    assert len(experiences) == world_size
    assert sorted(i for one in experiences for i in one.indices) == list(range(size))
    for one in experiences:
        assert one.plan == experiences[0].plan
        assert one.rewards.tolist() == [float(number) for number in range(size)]
        assert one.loss_tokens.tolist() == rollout.scalars.loss_tokens
        assert one.greedy_rewards is not None
        assert (one.iteration, one.temperature, one.metrics["critic/score/mean"]) == (5, 0.7, 1.0)
        assert [t.reward for t in one.trajectories] == one.rewards[one.indices].tolist()


def test_a_rank_learns_from_the_same_numbers_wherever_its_share_came_from(
    make_rollout: Callable[[int], Rollout],
) -> None:
    rollout = make_rollout(12)
    shares = list(rollout.deal(SETTINGS, 2))
    indices = rollout.scalars.plan(SETTINGS, 2).rank_sequences[1]
    local = ExperienceShare(
        scalars=rollout.scalars, rank=1, trajectories=[rollout.sequences[index] for index in indices]
    ).experience(SETTINGS, 2)
    received = sent(shares[1]).experience(SETTINGS, 2)

    positions = range(len(local))
    assert torch.equal(local.loss_mask(positions), received.loss_mask(positions))
    assert torch.equal(local.padded("rollout_logprobs", positions), received.padded("rollout_logprobs", positions))
    assert isinstance(shares[0].trajectories, list)  # this process's own stays as it is


def test_flat_trajectories_are_the_trajectories_without_what_nobody_reads() -> None:
    originals = [trajectory(number) for number in range(7)]
    originals[2].branches = [trajectory(3)]
    flat: FlatTrajectories = pickle.loads(pickle.dumps(FlatTrajectories(originals)))

    assert len(flat) == 7
    for original, copy in zip(originals, flat, strict=True):
        assert copy.rollout_logprobs == pytest.approx(original.rollout_logprobs)
        original.rollout_logprobs = copy.rollout_logprobs  # in float32, which the loss computes in
        original.media, original.branches = {}, []
        assert copy == original
    assert flat[-1] == originals[-1]
    assert flat[1:3] == originals[1:3]
    with pytest.raises(IndexError):
        flat[7]
    assert [t.tolist() for t in flat.tensors("response_ids")] == [t.response_ids for t in originals]


def test_tokens_take_thirteen_bytes_and_a_group_one_prompt() -> None:
    group = [trajectory(number, group_size=7) for number in range(7)]
    num_tokens = sum(len(t.response_ids) for t in group)

    assert FlatTrajectories(group).num_bytes == 13 * num_tokens + 4 * len(group[0].prompt_ids)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_validation_is_measured_once_and_every_trajectory_is_on_one_rank(world_size: int) -> None:
    trajectories = [trajectory(number) for number in range(3)]
    batches = EvaluationBatch.deal("s", trajectories, world_size)

    assert sorted(t.sample_index for batch in batches for t in batch.trajectories) == [0, 1, 2]
    assert batches[0].metrics["val-core/s/reward/mean@3"] == 1.0
    assert all(batch.metrics == batches[0].metrics for batch in batches)
