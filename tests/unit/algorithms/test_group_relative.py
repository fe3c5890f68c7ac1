from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.algorithms import advantages


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_two_of_four_right_gives_plus_and_minus_0_866() -> None:
    ids = torch.zeros(4, dtype=torch.int64)

    with_std = advantages.group_relative(tensor([1, 0, 0, 1]), ids)
    without_std = advantages.group_relative(tensor([1, 0, 0, 1]), ids, normalize_std=False)

    # Sample spread sqrt(4 * 0.25 / 3) = 0.577350; 0.5 / 0.577351 = 0.866024.
    torch.testing.assert_close(with_std, 0.866024 * tensor([1, -1, -1, 1]), atol=1e-6, rtol=0)
    torch.testing.assert_close(without_std, tensor([0.5, -0.5, -0.5, 0.5]))


def test_equal_rewards_give_exactly_zero_and_are_counted() -> None:  # O22
    rewards = torch.full((4,), 0.3)
    ids = torch.zeros(4, dtype=torch.int64)

    assert advantages.group_relative(rewards, ids).tolist() == [0.0] * 4
    assert advantages.zero_spread_share(rewards, ids) == 1.0


def test_share_of_groups_without_spread() -> None:
    ids = torch.tensor([5, 5, -1, -1, 9, 9, 2])
    assert (
        advantages.zero_spread_share(tensor([1, 1, 0, 1, 0, 0, 1]), ids) == 0.75
    )  # groups 5, 9 and the single 2 of four


def test_single_survivor_of_a_group_gets_zero() -> None:  # O23 b
    result = advantages.group_relative(tensor([1, 0, 7]), torch.tensor([0, 0, 1]))
    assert result[2] == 0.0
    assert result[0] > 0


def test_group_size_of_one_is_refused_at_start() -> None:  # O23 a
    with pytest.raises(ValueError, match=r"data.group_size=1: GRPO compares .* at least 2"):
        advantages.check_group_size(1, "GRPO")
    advantages.check_group_size(2, "GRPO")


def test_uneven_interleaved_groups() -> None:  # O24, sample spread
    ids = torch.tensor([0, 1, 0, 2, 0, 2])
    result = advantages.group_relative(tensor([1, 1, 0, 0.5, 0, 1]), ids)
    torch.testing.assert_close(result, tensor([1.1547, 0, -0.5773, -0.7071, -0.5773, 0.7071]), atol=1e-4, rtol=0)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.floats(-10, 10)), min_size=1, max_size=24),
    seed=st.integers(0, 1000),
)
def test_shuffling_the_rows_permutes_the_result(rows: list[tuple[int, float]], seed: int) -> None:  # O24
    ids = torch.tensor([group for group, _ in rows])
    rewards = tensor([reward for _, reward in rows])
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))

    whole = advantages.group_relative(rewards, ids)
    shuffled = advantages.group_relative(rewards[order], ids[order])

    torch.testing.assert_close(shuffled, whole[order], atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards holds NaN or infinity at flat positions \[1\]"):
        advantages.group_relative(tensor([0.0, bad]), torch.tensor([0, 0]))


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="Shapes differ"):
        advantages.group_relative(tensor([0.0, 1.0]), torch.tensor([0]))
    with pytest.raises(ValueError, match="must be floating point"):
        advantages.group_relative(torch.tensor([0, 1]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="integer dtype"):
        advantages.group_relative(tensor([0.0, 1.0]), tensor([0.0, 0.0]))
    with pytest.raises(ValueError, match=r"must be \[N\]"):
        advantages.group_relative(torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64))


def test_no_rows_give_no_advantages() -> None:
    empty = torch.zeros(0)
    ids = torch.zeros(0, dtype=torch.int64)
    assert advantages.group_relative(empty, ids).shape == (0,)
    assert advantages.zero_spread_share(empty, ids) == 0.0


def test_dtype_is_kept_and_inputs_are_not_changed() -> None:
    rewards = torch.tensor([1.0, 0.0, 2.0])
    before = rewards.clone()
    assert advantages.group_relative(rewards, torch.tensor([0, 0, 0])).dtype is torch.float32
    assert advantages.group_relative(rewards.double(), torch.tensor([0, 0, 0])).dtype is torch.float64
    assert torch.equal(rewards, before)
