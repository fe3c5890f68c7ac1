from __future__ import annotations

import math

import pytest
import torch

from lit_rl.algorithms.distillation import distillation_advantages, forward_kl_topk, reverse_kl, topk_mass

TEACHER = torch.tensor([[[0.6, 0.3]]], dtype=torch.float64).log()
STUDENT = torch.tensor([[[0.5, 0.25]]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ("ignore", 0.9 * math.log(1.2)),
        # With a vocabulary of three the bucket is the third token: the exact divergence.
        ("bucket", 0.9 * math.log(1.2) + 0.1 * math.log(0.1 / 0.25)),
        ("renormalize", 0.0),
    ],
)
def test_forward_kl_by_hand(tail: str, expected: float) -> None:
    assert forward_kl_topk(STUDENT, TEACHER, tail=tail).item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tail", ["ignore", "renormalize", "bucket"])
def test_forward_kl_of_equal_distributions_is_zero_and_negative_sums_are_cut(tail: str) -> None:
    assert forward_kl_topk(TEACHER, TEACHER, tail=tail).item() == pytest.approx(0.0, abs=1e-12)
    assert forward_kl_topk(TEACHER, STUDENT, tail=tail).item() >= 0.0


def test_forward_kl_gradient_reaches_only_the_student() -> None:
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    forward_kl_topk(student, teacher).sum().backward()
    torch.testing.assert_close(student.grad, -TEACHER.exp())
    assert teacher.grad is None


def test_clamps_bound_the_loss() -> None:
    far = torch.tensor([[[-80.0, -0.1]]], dtype=torch.float64)
    assert forward_kl_topk(far, TEACHER, max_loss=2.0).item() == 2.0
    floored = 0.6 * (math.log(0.6) + 10.0) + 0.3 * (math.log(0.3) + 0.1)
    assert forward_kl_topk(far, TEACHER, min_logprob=-10.0).item() == pytest.approx(floored)


def test_full_mass_bucket_stays_finite() -> None:
    full = torch.tensor([[[0.75, 0.25]]]).log().requires_grad_()
    loss = forward_kl_topk(full, torch.tensor([[[0.5, 0.5]]]).log(), tail="bucket")
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(full.grad).all()
    assert topk_mass(STUDENT).item() == pytest.approx(0.75)


def test_plain_k1_is_refused_as_a_loss_and_offered_as_advantage() -> None:
    student, teacher = STUDENT[..., 0], TEACHER[..., 0]
    with pytest.raises(ValueError, match=r"kind='k1': as a loss .* Use 'k1\+'"):
        reverse_kl(student, teacher, "k1")
    assert reverse_kl(student, teacher, "k1+").item() == pytest.approx(math.log(0.5 / 0.6))
    assert distillation_advantages(student, teacher).item() == pytest.approx(math.log(1.2))
    assert distillation_advantages(student, teacher, max_abs=0.1).item() == pytest.approx(0.1)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="tail='drop' is unknown. Choose one of ignore, renormalize, bucket"):
        forward_kl_topk(STUDENT, TEACHER, tail="drop")
    with pytest.raises(ValueError, match="Shapes differ"):
        forward_kl_topk(STUDENT[..., :1], TEACHER)
