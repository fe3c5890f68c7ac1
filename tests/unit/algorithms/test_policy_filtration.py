from __future__ import annotations

import pytest
import torch

from lit_rl.algorithms.policy_filtration import draw_counts, filtration_weights

REWARDS = torch.tensor([1.0, -2.0, 0.0, 1.0])


def test_weights_by_hand() -> None:
    assert filtration_weights(REWARDS).tolist() == pytest.approx([1 / 6, 4 / 6, 0, 1 / 6])
    assert filtration_weights(REWARDS, power=1.0).tolist() == pytest.approx([0.25, 0.5, 0, 0.25])
    assert filtration_weights(REWARDS, method="max-min").tolist() == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert filtration_weights(REWARDS, method="max-random").tolist() == pytest.approx([0.4, 0.1, 0.1, 0.4])


def test_rewards_of_zero_are_drawn_alike() -> None:
    assert filtration_weights(torch.zeros(4)).tolist() == [0.25] * 4
    assert filtration_weights(torch.zeros(0)).tolist() == []


def test_as_many_are_drawn_as_there_are_the_same_from_the_same_seed() -> None:
    weights = filtration_weights(REWARDS)
    counts = [draw_counts(weights, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]

    assert [int(count.sum()) for count in counts] == [4, 4, 4]
    assert torch.equal(counts[0], counts[1])
    assert all(int(count[2]) == 0 for count in counts)
    total = sum(draw_counts(weights, torch.Generator().manual_seed(seed)) for seed in range(500)) / 500
    torch.testing.assert_close(total.double() / 4, weights, atol=0.03, rtol=0)
    assert draw_counts(torch.zeros(0), torch.Generator()).tolist() == []


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"method='max' is unknown. Choose one of pow, max-min, max-random"):
        filtration_weights(REWARDS, method="max")
    with pytest.raises(ValueError, match=r"power=-1 must be at least 0"):
        filtration_weights(REWARDS, power=-1)
    with pytest.raises(ValueError, match="rewards holds NaN or infinity"):
        filtration_weights(torch.tensor([float("nan")]))
