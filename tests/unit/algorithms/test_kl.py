from __future__ import annotations

import json

import pytest
import torch

from lit_rl.algorithms.kl import AdaptiveKLController, FixedKLController, kl_in_reward, kl_penalty

LOGPROBS = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-1.5, -1.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("k1", "kl"), [0.5, -1.0]),
        (("abs",), [0.5, 1.0]),
        (("k2", "mse"), [0.125, 0.5]),
        (("k3", "low_var_kl"), [0.106531, 0.718282]),
    ],
)
def test_golden_values(kinds: tuple[str, ...], expected: list[float]) -> None:
    for kind in kinds:
        for suffix in ("", "+"):
            value = kl_penalty(LOGPROBS, REFERENCE, kind + suffix)
            torch.testing.assert_close(value, torch.tensor([expected], dtype=torch.float64), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_straight_through_has_the_gradient_of_k2(kind: str) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    kl_penalty(logprobs, REFERENCE, kind + "+").sum().backward()
    torch.testing.assert_close(logprobs.grad, LOGPROBS - REFERENCE)


def test_k3_gradient_is_one_minus_the_inverse_ratio_and_reference_gets_none() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    reference = REFERENCE.clone().requires_grad_()
    kl_penalty(logprobs, reference).sum().backward()
    torch.testing.assert_close(logprobs.grad, 1 - (REFERENCE - LOGPROBS).exp())
    assert reference.grad is None


def test_far_apart_policies_stay_finite() -> None:
    logprobs = torch.tensor([[-300.0, -0.1]], requires_grad=True)
    value = kl_penalty(logprobs, torch.tensor([[-0.1, -300.0]]))
    value.sum().backward()
    assert value[0, 0] == 10.0
    assert torch.isfinite(logprobs.grad).all()


def test_k1_and_k3_average_to_the_exact_divergence() -> None:
    # Expectation over all three tokens of the vocabulary, weighted by the policy.
    policy = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    reference = torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((policy * kl_penalty(policy.log(), reference.log(), kind)).sum(), exact)


def test_unknown_kind_lists_the_kinds() -> None:
    with pytest.raises(ValueError, match=r"KL kind 'full' is unknown. Choose one of k1, kl, abs"):
        kl_penalty(LOGPROBS, REFERENCE, "full")
    with pytest.raises(ValueError, match="Shapes differ"):
        kl_penalty(LOGPROBS, REFERENCE[:, :1])


def test_kl_in_reward_skips_masked_tokens_and_carries_no_gradient() -> None:
    rewards = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    logprobs = LOGPROBS.clone().requires_grad_()
    result = kl_in_reward(rewards, logprobs, REFERENCE, torch.tensor([[True, False]]), kl_coef=0.1)
    torch.testing.assert_close(result, torch.tensor([[-0.05, 1.0]], dtype=torch.float64))
    assert not result.requires_grad


def test_adaptive_controller_golden_value_and_direction() -> None:
    controller = AdaptiveKLController(kl_coef=0.001, target_kl=0.1, horizon=10_000)
    controller.update(kl=0.2, num_sequences=1024)
    assert controller.kl_coef == pytest.approx(0.00102048)
    controller.update(kl=0.0, num_sequences=1024)
    assert controller.kl_coef == pytest.approx(0.00102048 * (1 - 0.2 * 0.1024))


def test_adaptive_coefficient_stays_positive_for_batches_beyond_the_horizon() -> None:
    controller = AdaptiveKLController(kl_coef=0.001, target_kl=0.1, horizon=10)
    controller.update(kl=0.0, num_sequences=1000)
    assert controller.kl_coef == pytest.approx(0.0008)


def test_controllers_survive_a_restart_through_plain_numbers() -> None:
    adaptive = AdaptiveKLController()
    adaptive.update(kl=0.5, num_sequences=500)
    state = json.loads(json.dumps(adaptive.state_dict()))
    resumed = AdaptiveKLController()
    resumed.load_state_dict(state)
    assert resumed.kl_coef == adaptive.kl_coef

    fixed = FixedKLController(0.01)
    fixed.update(kl=9.0, num_sequences=100)
    assert fixed.state_dict() == {"kl_coef": 0.01}


def test_bad_controller_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="horizon=0 must be above 0"):
        AdaptiveKLController(horizon=0)
    with pytest.raises(ValueError, match="kl_coef=-1 must be"):
        FixedKLController(-1)
    with pytest.raises(ValueError, match="kl=nan must be finite"):
        AdaptiveKLController().update(kl=float("nan"), num_sequences=1)
