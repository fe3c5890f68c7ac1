from __future__ import annotations

import math

import pytest
import torch

from lit_rl.algorithms.entropy import entropy_from_logits, entropy_loss
from lit_rl.algorithms.reward_shaping import overlong_penalty
from lit_rl.algorithms.value_losses import clipped_value_loss, explained_variance, value_clip_fraction, value_loss


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_clipped_value_loss_golden_values_and_clip_share() -> None:
    values, old, returns = row(2.0, 0.2), row(1.0, 1.0), row(1.2, 1.2)
    torch.testing.assert_close(clipped_value_loss(values, old, returns), row(0.32, 0.5))
    torch.testing.assert_close(value_loss(values, returns), row(0.32, 0.5))
    # 2.0 is clipped to 1.5, which is further from the return 2.1; 1.0 does not move.
    fraction = value_clip_fraction(row(2.0, 1.0), row(1.0, 1.0), row(2.1, 1.0), torch.tensor([[True, True]]))
    assert fraction.item() == 0.5


def test_clipped_value_has_no_gradient_when_the_clipped_error_is_larger() -> None:
    values = row(2.0, 1.1).requires_grad_()
    clipped_value_loss(values, row(1.0, 1.0), row(2.1, 2.0)).sum().backward()
    torch.testing.assert_close(values.grad, row(0.0, -0.9))
    with pytest.raises(ValueError, match="clip_range=0 must be above 0"):
        clipped_value_loss(values, row(1.0, 1.0), row(2.0, 2.0), clip_range=0)


def test_explained_variance_of_perfect_constant_and_absent_critics() -> None:
    returns, mask = row(0.0, 1.0, 2.0, 99.0), torch.tensor([[True, True, True, False]])
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.ones_like(returns), returns, mask).item() == pytest.approx(0.0)
    assert explained_variance(returns, torch.ones_like(returns), mask).item() == 0.0
    assert explained_variance(returns, returns, torch.zeros_like(mask)).item() == 0.0


def test_entropy_of_uniform_and_of_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [1.0, 1.0, -math.inf, -math.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    torch.testing.assert_close(entropy, torch.tensor([math.log(4), math.log(2)]))
    entropy.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert entropy_loss(row(2.0), 0.1).item() == pytest.approx(-0.2)


def test_entropy_is_that_of_the_sampling_temperature() -> None:  # O27
    logits = torch.tensor([2.0, 0.0], dtype=torch.float64)
    p = math.exp(-0.01815)
    expected = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert entropy_from_logits(logits, temperature=0.5).item() == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        entropy_from_logits(logits, temperature=0)


def test_overlong_penalty_falls_linearly_to_the_limit() -> None:
    lengths = torch.tensor([10, 80, 90, 100, 120])
    penalty = overlong_penalty(lengths, max_response_tokens=100, overlong_buffer_tokens=20)
    assert penalty.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]
    with pytest.raises(ValueError, match="overlong_buffer_tokens=0 must lie between 1 and"):
        overlong_penalty(lengths, max_response_tokens=100, overlong_buffer_tokens=0)
