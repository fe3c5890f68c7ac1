from __future__ import annotations

import math

import pytest
import torch

from lit_rl.algorithms import importance

ENGINE = torch.full((2, 4), -1.0, dtype=torch.float64)
# Row 0: gaps 0.5, -0.5, 0; row 1: gap 0.1 twice. The rest is masked and far off.
TRAINER = ENGINE + torch.tensor([[0.5, -0.5, 0.0, 9.0], [0.1, 0.1, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])


def kept(kind: str, high: float, low: float | None = None) -> list[list[bool]]:
    return importance.rejection_mask(TRAINER, ENGINE, MASK, kind=kind, high=high, low=low).tolist()


NONE = [False] * 4
ROW_0, ROW_1 = MASK.tolist()


def test_token_rules_drop_tokens() -> None:
    assert kept("token_k1", math.exp(0.2)) == [[False, False, True, False], ROW_1]
    assert kept("token_k1", math.exp(0.6), low=math.exp(-0.2)) == [[True, False, True, False], ROW_1]
    assert kept("token_k2", 0.1) == [[False, False, True, False], ROW_1]
    # k3: e^0.5 - 1.5 = 0.1487 and e^-0.5 - 0.5 = 0.1065.
    assert kept("token_k3", 0.12) == [[False, True, True, False], ROW_1]


def test_sequence_rules_drop_whole_sequences() -> None:
    # Geometric means: e^0 and e^0.1; products: e^0 and e^0.2.
    assert kept("seq_mean_k1", math.exp(0.05)) == [ROW_0, NONE]
    assert kept("seq_sum_k1", math.exp(0.15)) == [ROW_0, NONE]
    # k2: sums 0.25 and 0.01, means a third and a half of it, maxima 0.125 and 0.005.
    assert kept("seq_sum_k2", 0.2) == [NONE, ROW_1]
    assert kept("seq_mean_k2", 0.05) == [NONE, ROW_1]
    assert kept("seq_max_k2", 0.1) == [NONE, ROW_1]
    assert kept("seq_max_k3", 0.2) == [ROW_0, ROW_1]


@pytest.mark.parametrize("kind", importance.REJECTION_KINDS)
def test_equal_logprobs_are_always_kept_and_the_mask_only_shrinks(kind: str) -> None:
    assert importance.rejection_mask(ENGINE, ENGINE, MASK, kind=kind, high=1.001).tolist() == MASK.tolist()
    narrowed = importance.rejection_mask(TRAINER, ENGINE, MASK, kind=kind, high=1.001)
    assert not bool((narrowed & ~MASK).any())


def test_ratio_on_the_bound_is_kept() -> None:
    exact = ENGINE + math.log(1.5)
    assert importance.rejection_mask(exact, ENGINE, MASK, kind="token_k1", high=1.5).tolist() == MASK.tolist()


def test_bad_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="kind='seq_max_k1' is unknown. Choose one of token_k1"):
        kept("seq_max_k1", 2.0)
    with pytest.raises(ValueError, match="takes one upper bound"):
        kept("token_k2", 0.1, low=0.05)
    with pytest.raises(ValueError, match="choose 0 < low < high"):
        kept("token_k1", 0.5)


@pytest.mark.parametrize("name", importance.PRESETS)
def test_every_preset_applies_and_leaves_agreeing_policies_alone(name: str) -> None:
    weights, mask = importance.correct_rollout(ENGINE, ENGINE, MASK, importance.rollout_correction(name))
    assert torch.equal(mask, MASK)
    if weights is not None:
        torch.testing.assert_close(weights, MASK.double())
    weights, mask = importance.correct_rollout(TRAINER, ENGINE, MASK, importance.rollout_correction(name))
    if weights is not None:
        assert bool((weights[~mask] == 0).all())
        assert torch.isfinite(weights).all()


def test_preset_with_changes_and_unknown_preset() -> None:
    correction = importance.rollout_correction("token-tis", cap=1.2)
    weights, _ = importance.correct_rollout(TRAINER, ENGINE, MASK, correction)
    assert weights is not None
    assert weights.max().item() == pytest.approx(1.2)
    with pytest.raises(ValueError, match="Rollout correction 'tis' is unknown. Choose one of off, token-tis"):
        importance.rollout_correction("tis")


def test_rejected_sequences_have_no_weight_and_normalising_counts_only_kept_ones() -> None:
    correction = importance.RolloutCorrection(
        level="token", normalize=True, rejections=(importance.Rejection(kind="seq_mean_k1", high=1.05),)
    )
    weights, mask = importance.correct_rollout(TRAINER, ENGINE, MASK, correction)
    assert weights is not None
    assert mask.tolist() == [ROW_0, NONE]
    assert weights[mask].mean().item() == pytest.approx(1.0)
    assert weights[1].sum().item() == 0.0
