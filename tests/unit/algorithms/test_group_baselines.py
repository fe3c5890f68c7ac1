from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.algorithms import advantages


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


ONE_GROUP = torch.zeros(4, dtype=torch.int64)
HALF_RIGHT = tensor([1, 0, 0, 1])


def test_golden_values_of_a_half_right_group() -> None:
    signs = tensor([1, -1, -1, 1])
    torch.testing.assert_close(advantages.leave_one_out(HALF_RIGHT, ONE_GROUP), 2 / 3 * signs)
    torch.testing.assert_close(advantages.group_policy_gradient(HALF_RIGHT, ONE_GROUP), signs)
    torch.testing.assert_close(advantages.max_likelihood_relative(HALF_RIGHT, ONE_GROUP), signs)


def test_leave_one_out_is_reward_minus_mean_of_the_others() -> None:
    result = advantages.leave_one_out(tensor([1, 2, 6]), torch.tensor([0, 0, 0]))
    torch.testing.assert_close(result, tensor([1 - 4, 2 - 3.5, 6 - 1.5]))


def test_pass_at_k_rewards_only_the_best_by_its_lead() -> None:
    ids = torch.tensor([0, 1, 0, 1, 0])
    result = advantages.pass_at_k(tensor([0.2, 4, 1, 4, 0.5]), ids)
    # Group 0: (1 - 0.5) / std(0.2, 1, 0.5) = 1.237176; group 1 is a tie.
    torch.testing.assert_close(result, tensor([0, 0, 1.237176, 0, 0]), atol=1e-5, rtol=0)
    undivided = advantages.pass_at_k(tensor([0.2, 4, 1, 4, 0.5]), ids, normalize_std=False)
    torch.testing.assert_close(undivided, tensor([0, 0, 0.5, 0, 0]))


def test_optimal_reward_baseline_weighs_by_length() -> None:
    result = advantages.optimal_reward_baseline(tensor([1, 0]), torch.tensor([3, 3]), torch.tensor([30, 10]))
    torch.testing.assert_close(result, tensor([0.25, -0.75]))


def test_reinforce_plus_plus_baseline_equals_whitening_the_spread_tokens() -> None:
    rewards, ids, num_tokens = tensor([1, 0, 0, 3]), torch.tensor([0, 0, 1, 1]), torch.tensor([2, 1, 3, 2])
    result = advantages.reinforce_plus_plus_baseline(rewards, ids, num_tokens)

    mask = torch.arange(3) < num_tokens[:, None]
    spread = tensor([0.5, -0.5, -1.5, 1.5]).unsqueeze(1).expand(4, 3)
    torch.testing.assert_close(result.unsqueeze(1) * mask, advantages.whiten(spread, mask))


def test_decoupled_rewards_of_different_scale_count_alike() -> None:
    parts = {"accuracy": tensor([1, 0, 1, 0]), "style": tensor([100, 100, 0, 0])}
    result = advantages.decoupled_group_relative(parts, ONE_GROUP, torch.tensor([5, 5, 5, 5]))
    # Each part gives +-0.866024; sums [1.732, 0, 0, -1.732]; token-weighted std over 20 tokens.
    scale = (10 * 1.732048**2 / 19) ** 0.5
    torch.testing.assert_close(result, tensor([1.732048, 0, 0, -1.732048]) / scale, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="must name the same rewards"):
        advantages.decoupled_group_relative(parts, ONE_GROUP, torch.ones(4), weights={"accuracy": 1.0})


ESTIMATORS = {
    "group_relative": lambda rewards, ids, tokens: advantages.group_relative(rewards, ids),
    "undivided": lambda rewards, ids, tokens: advantages.group_relative(rewards, ids, normalize_std=False),
    "leave_one_out": lambda rewards, ids, tokens: advantages.leave_one_out(rewards, ids),
    "pass_at_k": lambda rewards, ids, tokens: advantages.pass_at_k(rewards, ids),
    "gpg": lambda rewards, ids, tokens: advantages.group_policy_gradient(rewards, ids),
    "max_rl": lambda rewards, ids, tokens: advantages.max_likelihood_relative(rewards, ids),
    "opo": lambda rewards, ids, tokens: advantages.optimal_reward_baseline(rewards, ids, tokens),
    "reinforce_plus_plus_baseline": advantages.reinforce_plus_plus_baseline,
    "batch_scaled": lambda rewards, ids, tokens: advantages.batch_scaled_relative(rewards, ids),
    "gdpo": lambda rewards, ids, tokens: advantages.decoupled_group_relative(
        {"a": rewards, "b": -rewards / 2}, ids, tokens
    ),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_group_of_one_and_equal_rewards_get_zero(name: str) -> None:  # O22, O23
    rewards, ids = tensor([0.3, 0.3, 0.3, 0.9]), torch.tensor([0, 0, 0, 1])
    assert ESTIMATORS[name](rewards, ids, torch.tensor([4, 2, 3, 5])).tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 9)), min_size=2, max_size=16),
    seed=st.integers(0, 99),
)
def test_shuffling_permutes_and_dtype_and_inputs_stay(
    name: str, rows: list[tuple[int, int, int]], seed: int
) -> None:  # O24
    ids, rewards, tokens = (torch.tensor(column) for column in zip(*rows, strict=True))
    rewards = rewards.double() / 8
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    before = rewards.clone(), ids.clone(), tokens.clone()

    whole = ESTIMATORS[name](rewards, ids, tokens)

    assert torch.isfinite(whole).all()
    torch.testing.assert_close(ESTIMATORS[name](rewards[order], ids[order], tokens[order]), whole[order])
    assert ESTIMATORS[name](rewards.float(), ids, tokens).dtype is torch.float32
    for tensor_now, tensor_before in zip((rewards, ids, tokens), before, strict=True):
        assert torch.equal(tensor_now, tensor_before)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_reward_that_is_not_finite_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="rewards holds NaN or infinity"):
        ESTIMATORS[name](tensor([0.0, float("nan")]), torch.tensor([0, 0]), torch.tensor([1, 1]))


def test_batch_scaled_advantages_share_one_spread() -> None:
    result = advantages.batch_scaled_relative(tensor([1, 0, 4, 0]), torch.tensor([0, 0, 1, 1]))
    # Rewards 1, 0, 4, 0: mean 1.25, sample variance (0.0625 + 1.5625 + 7.5625 + 1.5625) / 3.
    spread = (10.75 / 3) ** 0.5
    torch.testing.assert_close(result, tensor([0.5, -0.5, 2, -2]) / spread, atol=1e-5, rtol=0)
    assert advantages.batch_scaled_relative(tensor([1]), torch.tensor([0])).tolist() == [0.0]


def test_negative_rewards_and_bad_norm_are_refused() -> None:
    with pytest.raises(ValueError, match="rewards holds a negative number"):
        advantages.max_likelihood_relative(tensor([-1.0, 1.0]), torch.tensor([0, 0]))
    with pytest.raises(ValueError, match="norm=0 must be above 0"):
        advantages.group_policy_gradient(HALF_RIGHT, ONE_GROUP, norm=0)
