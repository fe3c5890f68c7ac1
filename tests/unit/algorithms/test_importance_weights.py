from __future__ import annotations

import math

import pytest
import torch

from lit_rl.algorithms import importance
from lit_rl.algorithms.aggregate import masked_mean

TRAINER = torch.tensor([[-1.0, -2.0, -0.5, -9.0]], dtype=torch.float64)
ENGINE = torch.tensor([[-1.2, -4.0, -0.5, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]])


def test_token_weights_and_their_metrics_leave_masked_tokens_out() -> None:  # O26
    trainer = TRAINER.clone().requires_grad_()
    weights = importance.truncated_importance_weights(trainer, ENGINE, MASK, cap=2.0)
    metrics = importance.mismatch_metrics(trainer, ENGINE, MASK, cap=2.0)

    torch.testing.assert_close(
        weights, torch.tensor([[1.221403, 2.0, 1.0, 0.0]], dtype=torch.float64), atol=1e-6, rtol=0
    )
    assert not weights.requires_grad
    assert masked_mean(weights, MASK).item() == pytest.approx(1.4071, abs=1e-4)
    assert metrics["rollout_corr/clipped_share"].item() == pytest.approx(1 / 3)
    assert metrics["rollout_corr/logprob_gap_mean"].item() == pytest.approx(0.7333, abs=1e-4)
    assert metrics["rollout_corr/logprob_gap_max"].item() == pytest.approx(2.0)
    assert metrics["rollout_corr/kl"].item() == pytest.approx(-2.2 / 3)


def test_mismatch_metrics_by_hand() -> None:
    metrics = importance.mismatch_metrics(TRAINER, ENGINE, MASK)
    rho = [math.exp(0.2), math.exp(2.0), 1.0]
    squares = sum(r * r for r in rho)
    expected = {
        "k3_kl": (sum(rho) - 3 - 2.2) / 3,
        "chi2_token": squares / 3 - 1,
        "chi2_seq": math.exp(4.4) - 1,
        "eff_sample_size": sum(rho) ** 2 / (3 * squares),
        "training_ppl": math.exp(3.5 / 3),
        "rollout_ppl": math.exp(5.7 / 3),
    }
    for name, value in expected.items():
        assert metrics[f"rollout_corr/{name}"].item() == pytest.approx(value), name


def test_temperature_left_out_on_one_side_shows_in_the_metric() -> None:  # O27
    logits = torch.tensor([2.0, 0.0], dtype=torch.float64)
    engine = torch.log_softmax(logits / 0.5, 0)[:1].reshape(1, 1)
    unscaled = torch.log_softmax(logits, 0)[:1].reshape(1, 1)
    assert engine.item() == pytest.approx(-0.01815, abs=1e-5)
    gap = importance.mismatch_metrics(unscaled, engine, torch.ones(1, 1, dtype=torch.bool))[
        "rollout_corr/logprob_gap_mean"
    ]
    assert gap.item() == pytest.approx(0.10878, abs=1e-5)


def test_metrics_are_finite_without_tokens_and_without_columns() -> None:
    for width in (4, 0):
        metrics = importance.mismatch_metrics(
            torch.full((2, width), float("nan")), torch.zeros(2, width), torch.zeros(2, width, dtype=torch.bool)
        )
        values = {name: value.item() for name, value in metrics.items()}
        assert values.pop("rollout_corr/eff_sample_size") == 1.0
        assert set(values.values()) == {0.0}


def test_metrics_do_not_depend_on_padding() -> None:
    pad = (0, 3)
    padded = importance.mismatch_metrics(
        torch.nn.functional.pad(TRAINER, pad, value=float("-inf")),
        torch.nn.functional.pad(ENGINE, pad),
        torch.nn.functional.pad(MASK, pad),
    )
    for name, value in importance.mismatch_metrics(TRAINER, ENGINE, MASK).items():
        torch.testing.assert_close(padded[name], value)


def test_sequence_and_geometric_levels() -> None:
    sequence = importance.truncated_importance_weights(TRAINER, ENGINE, MASK, level="sequence", cap=100.0)
    geometric = importance.truncated_importance_weights(TRAINER, ENGINE, MASK, level="geometric", cap=100.0)
    torch.testing.assert_close(sequence, math.exp(2.2) * MASK.double())
    torch.testing.assert_close(geometric, math.exp(2.2 / 3) * MASK.double())


def test_icepop_zeroes_weights_outside_the_band() -> None:
    weights = importance.masked_importance_weights(TRAINER, ENGINE, MASK, low=0.5, high=5.0)
    torch.testing.assert_close(weights, torch.tensor([[math.exp(0.2), 0.0, 1.0, 0.0]], dtype=torch.float64))


def test_normalised_weights_average_one() -> None:
    weights = importance.truncated_importance_weights(TRAINER, ENGINE, MASK)
    normalised = importance.normalize_weights(weights, MASK)
    assert masked_mean(normalised, MASK).item() == pytest.approx(1.0)
    given = importance.normalize_weights(weights, MASK, mean=torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(given, weights / 2)
    none = torch.zeros_like(MASK)
    assert importance.normalize_weights(weights, none).sum() == 0


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="level='group' is unknown. Choose one of token, sequence, geometric"):
        importance.truncated_importance_weights(TRAINER, ENGINE, MASK, level="group")
    with pytest.raises(ValueError, match="cap=0 must be above 0"):
        importance.truncated_importance_weights(TRAINER, ENGINE, MASK, cap=0)
    with pytest.raises(ValueError, match="0 <= low < high"):
        importance.masked_importance_weights(TRAINER, ENGINE, MASK, low=2, high=1)
