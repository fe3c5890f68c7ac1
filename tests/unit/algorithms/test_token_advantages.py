from __future__ import annotations

import pytest
import torch

from lit_rl.algorithms import advantages


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def bools(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


REWARDS = row(0, 0, 0, 0, 1)
VALUES = row(0.1, 0.2, 0.9, 0.4, 0.5)
MASK = bools(1, 1, 0, 1, 1)


def test_gae_golden_values_pass_over_the_observation() -> None:
    estimates, returns = advantages.gae(REWARDS, VALUES, MASK, gamma=1.0, lam=0.95)
    expected = row(0.808937, 0.74625, 0, 0.575, 0.5)
    torch.testing.assert_close(estimates, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, (expected + VALUES) * MASK, atol=1e-6, rtol=0)

    whitened = advantages.whiten(estimates, MASK)
    torch.testing.assert_close(whitened, row(1.049517, 0.614935, 0, -0.572257, -1.092195), atol=1e-5, rtol=0)


def test_gae_takes_a_lambda_per_row() -> None:
    rewards, values, mask = (tensor.repeat(3, 1) for tensor in (REWARDS, VALUES, MASK))
    lam = torch.tensor([0.95, 0.0, 1.0], dtype=torch.float64)

    estimates, _ = advantages.gae(rewards, values, mask, gamma=0.9, lam=lam)

    for i, one in enumerate(lam.tolist()):
        torch.testing.assert_close(estimates[i : i + 1], advantages.gae(REWARDS, VALUES, MASK, gamma=0.9, lam=one)[0])
    with pytest.raises(ValueError, match=r"lam=1.5 is outside"):
        advantages.gae(rewards, values, mask, lam=lam * 1.5)


def test_lambda_grows_with_the_length_of_the_answer() -> None:
    lam = advantages.length_adaptive_lambda(torch.tensor([0, 10, 40, 200]), alpha=0.05)
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.5, 0.9]))
    with pytest.raises(ValueError, match=r"alpha=0.0 must be above 0"):
        advantages.length_adaptive_lambda(torch.tensor([1]), alpha=0.0)


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    estimates, returns = advantages.gae(row(0, 0, 1), row(0.5, 0.5, 0.5), bools(1, 1, 1), gamma=1.0, lam=1.0)
    torch.testing.assert_close(estimates, row(0.5, 0.5, 0.5))
    torch.testing.assert_close(returns, row(1, 1, 1))


def slow_gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    result = torch.zeros_like(values)
    for i in range(mask.shape[0]):
        next_value = next_advantage = 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[i, t]:
                delta = float(rewards[i, t]) + gamma * next_value - float(values[i, t])
                next_advantage = delta + gamma * lam * next_advantage
                next_value = float(values[i, t])
                result[i, t] = next_advantage
    return result


def test_gae_equals_the_textbook_loop_whatever_stands_under_the_mask() -> None:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 33, generator=generator) < 0.6
    mask[4] = False
    rewards, values = torch.randn(2, 6, 33, generator=generator, dtype=torch.float64)
    expected = slow_gae(rewards, values, mask, 0.9, 0.8)

    dirty_rewards, dirty_values = (torch.where(mask, x, float("nan")) for x in (rewards, values))
    estimates, returns = advantages.gae(dirty_rewards, dirty_values, mask, gamma=0.9, lam=0.8)

    torch.testing.assert_close(estimates, expected)
    torch.testing.assert_close(returns, torch.where(mask, expected + values, 0.0))
    assert torch.equal(estimates[4], torch.zeros(33).double())


def test_return_passes_over_an_observation_and_padding() -> None:  # O25
    returns = advantages.discounted_returns(row(0, 0, 1), bools(1, 0, 1), gamma=0.5)
    torch.testing.assert_close(returns, row(0.5, 0, 1.0))
    returns = advantages.discounted_returns(row(0, 0, 0, 1, 0, 0), bools(1, 0, 0, 1, 0, 0), gamma=0.5)
    torch.testing.assert_close(returns, row(0.5, 0, 0, 1.0, 0, 0))


def test_reinforce_plus_plus_returns_and_whitening() -> None:
    estimates, returns = advantages.reinforce_plus_plus(REWARDS, MASK, gamma=0.9)
    torch.testing.assert_close(returns, row(0.729, 0.81, 0, 0.9, 1))
    assert estimates[MASK].mean().item() == pytest.approx(0.0, abs=1e-9)
    assert estimates[MASK].std().item() == pytest.approx(1.0, abs=1e-5)
    assert estimates[0, 2] == 0


def test_reward_lands_on_the_last_sampled_token() -> None:
    mask = torch.tensor([[True, False, True, False], [True, True, False, False], [False] * 4])
    placed = advantages.rewards_at_last_token(torch.tensor([2.0, -1.0, 7.0]), mask)
    assert placed.tolist() == [[0, 0, 2, 0], [0, -1, 0, 0], [0, 0, 0, 0]]


def test_remax_subtracts_the_greedy_reward() -> None:
    estimates, returns = advantages.remax(row(0, 0, 1), torch.tensor([0.25]).double(), bools(1, 0, 1))
    torch.testing.assert_close(returns, row(1, 0, 1))
    torch.testing.assert_close(estimates, row(0.75, 0, 0.75))
    with pytest.raises(ValueError, match=r"greedy_rewards has shape \(2,\)"):
        advantages.remax(row(0, 0, 1), torch.zeros(2), bools(1, 0, 1))


def test_whitening_with_global_moments_equals_whitening_the_whole() -> None:
    values = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.7
    mean, std = advantages.masked_mean_and_std(values, mask)
    halves = [advantages.whiten(values[rows], mask[rows], mean=mean, std=std) for rows in ([0, 1], [2, 3])]
    torch.testing.assert_close(torch.cat(halves), advantages.whiten(values, mask))


def test_whitening_leaves_a_single_token_alone() -> None:
    torch.testing.assert_close(advantages.whiten(row(3.0, 9.0), bools(1, 0)), row(3.0, 0.0))
    assert advantages.whiten(row(3.0, 9.0), bools(0, 0)).tolist() == [[0.0, 0.0]]
    with pytest.raises(ValueError, match="one of mean and std"):
        advantages.whiten(row(3.0), bools(1), mean=torch.tensor(0.0))


@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_discounts_out_of_range_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=1.5 is outside \[0.0, 1.0\]"):
        advantages.gae(REWARDS, VALUES, MASK, **{name: 1.5})


def test_bad_shapes_and_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="Shapes differ"):
        advantages.gae(REWARDS, VALUES[:, :2], MASK)
    with pytest.raises(ValueError, match="must be torch.bool"):
        advantages.discounted_returns(REWARDS, MASK.double())


def test_float32_stays_float32_and_inputs_are_not_changed() -> None:
    rewards, values = REWARDS.float(), VALUES.float()
    before = rewards.clone(), values.clone(), MASK.clone()
    for result in (*advantages.gae(rewards, values, MASK), *advantages.reinforce_plus_plus(rewards, MASK)):
        assert result.dtype is torch.float32
    assert torch.equal(rewards, before[0])
    assert torch.equal(values, before[1])
    assert torch.equal(MASK, before[2])


def test_no_columns_and_no_rows_are_no_error() -> None:
    for shape in ((2, 0), (0, 3)):
        empty = torch.zeros(shape)
        estimates, _ = advantages.gae(empty, empty, empty.bool())
        assert estimates.shape == shape


def test_optimal_token_baseline_by_hand() -> None:
    # w = 1 - 2 * 0.5 + 0.5 = 0.5 and 1 - 2 * 0.9 + 0.82 = 0.02; the running sums are W = [0.5, 1.0] and [0.02, 0.04].
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, False]])
    pi = torch.tensor([[0.5] * 3, [0.9] * 3], dtype=torch.float64)
    squares = torch.tensor([[0.5] * 3, [0.82] * 3], dtype=torch.float64)
    estimates, returns = advantages.optimal_token_baseline(rewards, mask, torch.tensor([0, 0]), pi.log(), squares)
    baseline = 0.5 / 0.52
    torch.testing.assert_close(returns[0], torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    expected = torch.tensor([[1 - baseline, 1 - baseline, 0], [-baseline, -baseline, 0]], dtype=torch.float64)
    torch.testing.assert_close(estimates, expected, atol=1e-6, rtol=0)


def test_optimal_token_baseline_counts_policy_tokens_and_zeroes_singletons() -> None:
    # Row 0 has a tool token in the middle; its tokens still meet the first two of row 1. Row 1's third token is alone.
    mask = torch.tensor([[True, False, True, False], [True, True, True, False], [True, True, False, False]])
    rewards = advantages.rewards_at_last_token(torch.tensor([1.0, 3.0, 5.0]).double(), mask)
    pi = torch.full((3, 4), 0.5, dtype=torch.float64)
    estimates, _ = advantages.optimal_token_baseline(rewards, mask, torch.tensor([0, 0, 1]), pi.log(), pi)
    expected = [[-1, 0, -1, 0], [1, 1, 3, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(estimates, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_optimal_token_baseline_uses_importance_weights() -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    half = torch.full((2, 1), 0.5, dtype=torch.float64)
    rewards = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    weights = torch.tensor([[2.0], [1.0]], dtype=torch.float64)
    estimates, _ = advantages.optimal_token_baseline(
        rewards, mask, torch.tensor([0, 0]), half.log(), half, importance_weights=weights
    )
    # Weights enter squared: baseline = 4 / 5.
    torch.testing.assert_close(estimates, torch.tensor([[0.2], [-0.8]], dtype=torch.float64), atol=1e-6, rtol=0)


def test_optimal_token_baseline_is_the_same_whatever_rank_holds_a_row() -> None:
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(6, 7, generator=generator) < 0.7
    rewards = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    pi = torch.rand(6, 7, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    index = torch.tensor([0, 1, 0, 2, 1, 0])
    whole, _ = advantages.optimal_token_baseline(rewards, mask, index, pi.log(), pi.square())

    def on_rank(rows: list[int], exchange) -> torch.Tensor:
        return advantages.optimal_token_baseline(
            rewards[rows], mask[rows], index[rows], pi[rows].log(), pi[rows].square(), num_groups=3, num_steps=7,
            sum_over_ranks=exchange,
        )[0]  # fmt: skip

    shares = [[0, 3, 4], [1, 2, 5]]
    sums: list[torch.Tensor] = []
    for rows in shares:  # what each rank would send
        on_rank(rows, lambda own: (sums.append(own.clone()), own)[1])
    for rows in shares:
        torch.testing.assert_close(on_rank(rows, lambda own: sums[0] + sums[1]), whole[rows])


def test_optimal_token_baseline_takes_a_trajectory_beside_empty_ones_for_a_single_one() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    half = torch.full((2, 2), 0.5, dtype=torch.float64)
    estimates, _ = advantages.optimal_token_baseline(half, mask, torch.tensor([0, 0]), half.log(), half)
    assert not estimates.any()


GROUPS = torch.tensor([0, 0, 1, 1, 1])
PI = torch.rand(5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 0.8 + 0.1
SCORES = torch.randn(5, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def whitened_turns(rewards: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    exists = advantages.turn_mask(mask, 3)
    turn_rewards = torch.where(exists, rewards[:, :3].nan_to_num(), 0.0)
    values = advantages.turn_returns(turn_rewards, exists, gamma=0.9)
    return advantages.spread_turns(advantages.turn_relative(values, exists, GROUPS[rows]), mask)


TOKEN_ESTIMATORS = {
    "gae": lambda rewards, mask, rows: advantages.gae(
        rewards, torch.nn.functional.pad(SCORES, (0, rewards.shape[1] - 6), value=3.0)[rows], mask, gamma=0.9, lam=0.8
    )[0],
    "reinforce_plus_plus": lambda rewards, mask, rows: advantages.reinforce_plus_plus(rewards, mask, gamma=0.9)[0],
    "remax": lambda rewards, mask, rows: advantages.remax(rewards, SCORES[rows, 0], mask)[0],
    "optimal_token_baseline": lambda rewards, mask, rows: advantages.optimal_token_baseline(
        rewards,
        mask,
        GROUPS[rows],
        torch.nn.functional.pad(PI, (0, rewards.shape[1] - 6), value=0.5)[rows].log(),
        torch.nn.functional.pad(PI.square(), (0, rewards.shape[1] - 6), value=0.5)[rows],
    )[0],
    "turn_relative": whitened_turns,
}


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
def test_rows_permute_padding_is_inert_and_masked_rewards_do_not_count(name: str) -> None:
    estimate, rows = TOKEN_ESTIMATORS[name], torch.arange(5)
    mask = torch.tensor(
        [[1, 1, 0, 1, 0, 0], [1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0], [1] * 6]
    ).bool()
    rewards = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = estimate(rewards, mask, rows)
    assert whole[~mask].abs().max() == 0.0
    assert whole[mask].abs().max() > 0.1

    order = torch.tensor([3, 0, 4, 2, 1])
    torch.testing.assert_close(estimate(rewards[order], mask[order], order), whole[order])

    padded = estimate(torch.nn.functional.pad(rewards, (0, 3), value=7.0), torch.nn.functional.pad(mask, (0, 3)), rows)
    torch.testing.assert_close(padded, torch.nn.functional.pad(whole, (0, 3)))

    if name != "turn_relative":  # its rewards are per turn
        torch.testing.assert_close(estimate(torch.where(mask, rewards, float("nan")), mask, rows), whole)


@pytest.mark.parametrize("name", TOKEN_ESTIMATORS)
def test_without_a_sampled_token_every_advantage_is_zero(name: str) -> None:
    rewards = torch.ones(5, 6, dtype=torch.float64)
    estimates = TOKEN_ESTIMATORS[name](rewards, torch.zeros(5, 6, dtype=torch.bool), torch.arange(5))
    assert torch.equal(estimates, torch.zeros(5, 6, dtype=torch.float64))
