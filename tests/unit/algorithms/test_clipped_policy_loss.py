from __future__ import annotations

import pytest
import torch

from lit_rl.algorithms.policy_losses import clip_fractions, clipped_policy_loss


def logs(ratios: list[float]) -> torch.Tensor:
    return torch.tensor([ratios], dtype=torch.float64).log()


RATIOS = [1.5, 0.5, 1.5, 0.5, 5.0]
SIGNS = torch.tensor([[1.0, 1.0, -1.0, -1.0, -1.0]], dtype=torch.float64)


def test_golden_values_for_both_signs_and_the_dual_clip() -> None:
    loss = clipped_policy_loss(logs(RATIOS), torch.zeros(1, 5).double(), SIGNS)
    torch.testing.assert_close(loss, torch.tensor([[-1.2, -0.5, 1.5, 0.8, 3.0]], dtype=torch.float64))


def test_without_dual_clip_the_loss_is_unbounded() -> None:
    loss = clipped_policy_loss(logs([5.0]), torch.zeros(1, 1).double(), SIGNS[:, 4:], clip_ratio_c=None)
    assert loss.item() == pytest.approx(5.0)


def test_clipped_tokens_have_no_gradient_and_others_minus_advantage_times_ratio() -> None:
    logprobs = logs(RATIOS).requires_grad_()
    clipped_policy_loss(logprobs, torch.zeros(1, 5).double(), SIGNS).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.5, 1.5, 0.0, 0.0]], dtype=torch.float64))


def test_equals_the_textbook_maximum_of_surrogates() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(8, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    old = torch.randn(8, 16, generator=generator, dtype=torch.float64)
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64)

    ratio = (logprobs - old).exp()
    textbook = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3))
    textbook = torch.where(advantages < 0, torch.min(-advantages * 3.0, textbook), textbook)
    ours = clipped_policy_loss(logprobs, old, advantages, clip_ratio_high=0.3)

    torch.testing.assert_close(ours, textbook)
    (expected,) = torch.autograd.grad(textbook.sum(), logprobs, retain_graph=True)
    (actual,) = torch.autograd.grad(ours.sum(), logprobs)
    torch.testing.assert_close(actual, expected)


def test_huge_log_ratio_stays_finite() -> None:
    logprobs = torch.tensor([[500.0, -500.0]], requires_grad=True)
    loss = clipped_policy_loss(logprobs, torch.zeros(1, 2), -torch.ones(1, 1), clip_ratio_c=None)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()


def test_no_gradient_reaches_old_logprobs_and_advantages() -> None:
    old = torch.zeros(1, 2, requires_grad=True)
    advantages = torch.ones(1, 2, requires_grad=True)
    logprobs = torch.zeros(1, 2, requires_grad=True)
    clipped_policy_loss(logprobs, old, advantages).sum().backward()
    assert old.grad is None
    assert advantages.grad is None


def test_clip_fractions_count_only_unmasked_tokens() -> None:
    mask = torch.tensor([[True, True, True, True, False]])
    old = torch.zeros(1, 5).double()
    clipped, dual = clip_fractions(logs(RATIOS), old, SIGNS, mask)
    # Clipped: ratio 1.5 with A > 0 and 0.5 with A < 0; the dual clip's token is masked here.
    assert (clipped.item(), dual.item()) == (0.5, 0.0)
    assert clip_fractions(logs(RATIOS), old, SIGNS, torch.ones(1, 5, dtype=torch.bool))[1].item() == pytest.approx(0.2)
    assert clip_fractions(logs(RATIOS), old, SIGNS, torch.zeros(1, 5, dtype=torch.bool))[0].item() == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [({"clip_ratio_c": 1.0}, "clip_ratio_c=1.0 must be above 1"), ({"clip_ratio_low": -0.1}, "clip_ratio_low=-0.1")],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clipped_policy_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), **options)


def test_advantages_of_shape_n_are_refused_instead_of_broadcast() -> None:
    with pytest.raises(ValueError, match=r"advantages has shape \(2,\)"):
        clipped_policy_loss(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2))
