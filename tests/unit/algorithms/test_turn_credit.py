from __future__ import annotations

import pytest
import torch

from lit_rl.algorithms import advantages

# Two turns of two and one tokens around a tool's answer; one turn of one token; none.
MASK = torch.tensor([[True, True, False, True, False], [False, True, False, False, False], [False] * 5])


def test_turns_are_unbroken_runs_of_sampled_tokens() -> None:
    assert advantages.turn_index(MASK).tolist() == [[0, 0, -1, 1, -1], [-1, 0, -1, -1, -1], [-1] * 5]
    assert advantages.turn_mask(MASK, 2).tolist() == [[True, True], [True, False], [False, False]]


def test_turn_values_reach_every_token_or_only_the_last() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 9.0], [9.0, 9.0]])
    assert advantages.spread_turns(values, MASK).tolist() == [[1, 1, 0, 2, 0], [0, 3, 0, 0, 0], [0] * 5]
    last = advantages.spread_turns(values, MASK, only_last_token=True)
    assert last.tolist() == [[0, 1, 0, 2, 0], [0, 3, 0, 0, 0], [0] * 5]
    with pytest.raises(ValueError, match="up to 2 turns per row"):
        advantages.spread_turns(values[:, :1], MASK)


def test_returns_are_discounted_per_turn_not_per_token() -> None:
    exists = torch.tensor([[True, True, True], [True, False, False]])
    rewards = torch.tensor([[0.0, 1.0, 4.0], [2.0, 7.0, 7.0]], dtype=torch.float64)
    returns = advantages.turn_returns(rewards, exists, gamma=0.5)
    assert returns.tolist() == [[1.5, 3.0, 4.0], [2.0, 0.0, 0.0]]
    assert advantages.turn_returns(rewards, exists, gamma=0.0).tolist() == [[0.0, 1.0, 4.0], [2.0, 0.0, 0.0]]


def test_each_turn_is_judged_against_the_same_turn_of_its_group() -> None:
    exists = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    values = torch.tensor([[1.0, 5.0], [0.0, 3.0], [0.0, 9.0], [8.0, 9.0]], dtype=torch.float64)
    result = advantages.turn_relative(values, exists, torch.tensor([4, 4, 4, 2]), normalize_std=False)
    expected = torch.tensor([[2 / 3, 1.0], [-1 / 3, -1.0], [-1 / 3, 0.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(result, expected)


def test_one_turn_per_trajectory_is_the_group_relative_advantage() -> None:
    rewards, ids = torch.tensor([1.0, 0.0, 0.5, 0.0]), torch.tensor([0, 0, 1, 1])
    result = advantages.turn_relative(rewards.unsqueeze(1), torch.ones(4, 1, dtype=torch.bool), ids)
    torch.testing.assert_close(result.squeeze(1), advantages.group_relative(rewards, ids))
