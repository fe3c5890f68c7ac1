from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_rl.algorithms.aggregate import AGGREGATION_MODES, aggregate_loss, masked_mean, prompt_mean_weights

LOSS = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 99.0, 99.0, 99.0]], dtype=torch.float64)
MASK = torch.tensor([[True] * 4, [True, False, False, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 3.0),
        ("token-sum", 15.0),
        ("seq-mean-token-sum", 7.5),
        ("seq-mean-token-sum-norm", 1.875),
        ("seq-mean-token-mean", 3.75),
        # Prompt one: 10 / 4 tokens; prompt two: 5 / 1; mean 3.75.
        ("prompt-mean", 3.75),
    ],
)
def test_golden_value(mode: str, expected: float) -> None:
    weights = prompt_mean_weights(torch.tensor([4, 1]), torch.tensor([0, 1]))
    value = aggregate_loss(LOSS, MASK, mode=mode, num_tokens=5, num_sequences=2, loss_scale=4, prompt_weights=weights)
    assert value.item() == pytest.approx(expected)


def test_token_mean_is_not_the_mean_of_micro_batch_means() -> None:  # O21
    first = aggregate_loss(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), num_tokens=5, num_sequences=2)
    second = aggregate_loss(torch.full((1, 1), 3.0), torch.ones(1, 1, dtype=torch.bool), num_tokens=5, num_sequences=2)
    assert (first + second).item() == pytest.approx(1.4)

    first = aggregate_loss(torch.full((1, 2), 2.0), torch.ones(1, 2, dtype=torch.bool), num_tokens=8, num_sequences=2)
    second = aggregate_loss(torch.ones(1, 6), torch.ones(1, 6, dtype=torch.bool), num_tokens=8, num_sequences=2)
    assert (first + second).item() == pytest.approx(1.25)


def ragged_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    lengths = torch.tensor([7, 1, 0, 4, 3, 6])
    group_ids = torch.tensor([3, 1, 1, 3, 8, 8])
    mask = torch.arange(7) < lengths[:, None]
    mask[0, 2:4] = False  # a tool's tokens
    loss = torch.randn(6, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = {"num_tokens": float(mask.sum()), "num_sequences": 5.0, "loss_scale": 16.0}
    return loss, mask, prompt_mean_weights(mask.sum(1), group_ids), counts


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("splits", [[[0], [1], [2], [3], [4], [5]], [[5, 0], [3, 2, 1, 4]]])
def test_value_and_gradient_do_not_depend_on_the_split(mode: str, splits: list[list[int]]) -> None:  # O21
    loss, mask, weights, counts = ragged_batch()
    whole_input = loss.clone().requires_grad_()
    whole = aggregate_loss(whole_input, mask, mode=mode, prompt_weights=weights, **counts)
    whole.backward()

    split_input = loss.clone().requires_grad_()
    total = 0.0
    for rows in splits:
        width = max(int(mask[rows].sum(1).max()), 7 if 0 in rows else 1)  # narrower padding in narrow micro-batches
        part = aggregate_loss(
            split_input[rows, :width], mask[rows, :width], mode=mode, prompt_weights=weights[rows], **counts
        )
        part.backward()
        total += part.item()

    assert total == pytest.approx(whole.item(), abs=1e-6)
    torch.testing.assert_close(split_input.grad, whole_input.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_padding_content_and_width_change_nothing(mode: str) -> None:
    loss, mask, weights, counts = ragged_batch()
    padded = torch.nn.functional.pad(torch.where(mask, loss, float("nan")), (0, 5), value=float("inf"))
    padded_mask = torch.nn.functional.pad(mask, (0, 5))

    plain = aggregate_loss(loss, mask, mode=mode, prompt_weights=weights, **counts)
    again = aggregate_loss(padded, padded_mask, mode=mode, prompt_weights=weights, **counts)
    torch.testing.assert_close(again, plain, atol=1e-12, rtol=0)


def test_prompt_mean_weighs_prompts_alike_whatever_their_tokens() -> None:
    # Group 0: 3 + 1 tokens, group 1: 2 tokens, group 2: none and not counted.
    weights = prompt_mean_weights(torch.tensor([3, 1, 2, 0]), torch.tensor([0, 0, 1, 2]))
    torch.testing.assert_close(weights, torch.tensor([1 / 8, 1 / 8, 1 / 4, 0.0]))


def test_mini_batch_without_tokens_is_zero_and_keeps_the_graph() -> None:  # O16
    loss = torch.ones(2, 3, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for mode in AGGREGATION_MODES:
        value = aggregate_loss(
            loss, mask, mode=mode, num_tokens=0, num_sequences=0, loss_scale=3, prompt_weights=torch.zeros(2)
        )
        value.backward()
        assert value.item() == 0.0
    assert torch.equal(loss.grad, torch.zeros(2, 3))


def test_bad_arguments_name_the_fix() -> None:
    counts = {"num_tokens": 5, "num_sequences": 2}
    with pytest.raises(ValueError, match="mode='mean' is unknown. Choose one of token-mean, token-sum"):
        aggregate_loss(LOSS, MASK, mode="mean", **counts)
    with pytest.raises(ValueError, match="loss_scale=None"):
        aggregate_loss(LOSS, MASK, mode="seq-mean-token-sum-norm", **counts)
    with pytest.raises(ValueError, match="prompt_weights is None"):
        aggregate_loss(LOSS, MASK, mode="prompt-mean", **counts)
    with pytest.raises(ValueError, match="num_tokens=0, but this micro-batch alone has 5"):
        aggregate_loss(LOSS, MASK, num_tokens=0, num_sequences=2)
    with pytest.raises(ValueError, match="Shapes differ"):
        aggregate_loss(LOSS, MASK[:, :2], **counts)
    with pytest.raises(ValueError, match=r"mask has dtype torch.float64; it must be torch.bool"):
        aggregate_loss(LOSS, MASK.double(), **counts)


def test_masked_mean_ignores_what_stands_under_the_mask() -> None:
    values = torch.tensor([[1.0, 3.0, float("nan")], [float("inf"), 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert masked_mean(values, mask).item() == 2.0
    assert masked_mean(values, mask, dim=1).tolist() == [2.0, 0.0]
