from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lit_rl.algorithms import policy_losses
from lit_rl.algorithms.aggregate import aggregate_loss


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def all_true(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(like.shape, dtype=torch.bool)


GAPS = row(0.1, 0.3, -0.1)
OLD = row(-1.0, -1.0, -1.0)


def gradient(loss: Callable[[torch.Tensor], torch.Tensor], logprobs: torch.Tensor) -> torch.Tensor:
    leaf = logprobs.clone().requires_grad_()
    loss(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_gspo_uses_the_geometric_mean_ratio_at_every_token() -> None:
    mask, advantage = all_true(GAPS), row(1.0)
    loss = policy_losses.gspo_loss(OLD + GAPS, OLD, advantage, mask, clip_ratio_low=0.5, clip_ratio_high=0.5)
    torch.testing.assert_close(loss, row(-1.105171, -1.105171, -1.105171), atol=1e-6, rtol=0)


def test_gspo_gradient_is_the_sequence_ratio_at_each_token_and_zero_where_clipped() -> None:
    mask = all_true(GAPS)
    options = {"clip_ratio_low": 0.5, "clip_ratio_high": 0.5}
    free = gradient(lambda x: policy_losses.gspo_loss(x, OLD, row(1.0), mask, **options), OLD + GAPS)
    torch.testing.assert_close(free, -math.exp(0.1) * torch.ones(1, 3).double())
    clipped = gradient(lambda x: policy_losses.gspo_loss(x, OLD, row(1.0), mask), OLD + GAPS)
    assert clipped.tolist() == [[0.0, 0.0, 0.0]]


def test_gspo_with_sequence_mean_is_the_papers_sequence_objective() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(4, 6, generator=generator, dtype=torch.float64)
    gaps = 0.1 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 1])[:, None]
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [2.0]], dtype=torch.float64)

    def ours(x: torch.Tensor) -> torch.Tensor:
        loss = policy_losses.gspo_loss(x, old, advantages, mask, clip_ratio_low=0.02, clip_ratio_high=0.02)
        return aggregate_loss(loss, mask, mode="seq-mean-token-mean", num_tokens=13, num_sequences=4)

    def paper(x: torch.Tensor) -> torch.Tensor:
        ratio = (((x - old) * mask).sum(1) / mask.sum(1)).exp()
        plain, clipped = ratio * advantages[:, 0], ratio.clamp(0.98, 1.02) * advantages[:, 0]
        return -torch.min(plain, clipped).mean()

    torch.testing.assert_close(ours(old + gaps), paper(old + gaps))
    torch.testing.assert_close(gradient(ours, old + gaps), gradient(paper, old + gaps))


def test_gmpo_golden_value_and_gradient() -> None:
    mask = all_true(GAPS)

    def ours(x: torch.Tensor) -> torch.Tensor:
        loss = policy_losses.gmpo_loss(x, OLD, row(1.0), mask, clip_ratio_low=0.2, clip_ratio_high=0.2)
        return aggregate_loss(loss, mask, mode="seq-mean-token-mean", num_tokens=3, num_sequences=1)

    value = ours(OLD + GAPS)
    assert value.item() == pytest.approx(-1.068939, abs=1e-6)
    # The second token is clipped at 0.2; the others carry a third of the sequence's gradient each.
    third = value.item() / 3
    torch.testing.assert_close(gradient(ours, OLD + GAPS), row(third, 0.0, third))


def test_gmpo_clips_only_downwards_for_a_negative_advantage() -> None:
    loss = policy_losses.gmpo_loss(
        OLD + row(0.5, -0.5, 0.0), OLD, row(-1.0), all_true(OLD), clip_ratio_low=0.2, clip_ratio_high=0.2
    )
    assert loss[0, 0].item() == pytest.approx(math.exp((0.5 - 0.2 + 0.0) / 3))


def test_cispo_keeps_a_gradient_at_clipped_tokens() -> None:
    logprobs, old = row(math.log(1.5), math.log(0.5), 0.05) - 1.0, OLD
    advantages = row(1.0, -2.0, 1.0)
    expected_weights = row(1.2, 0.8, math.exp(0.05))
    loss = policy_losses.cispo_loss(logprobs, old, advantages)
    torch.testing.assert_close(loss, -expected_weights * advantages * logprobs)
    actual = gradient(lambda x: policy_losses.cispo_loss(x, old, advantages), logprobs)
    torch.testing.assert_close(actual, -expected_weights * advantages)


def test_reinforce_gradient_is_minus_the_advantage() -> None:
    actual = gradient(lambda x: policy_losses.reinforce_loss(x, row(2.0)), OLD)
    torch.testing.assert_close(actual, row(-2.0, -2.0, -2.0))


def test_sapo_golden_values_and_unit_gradient_at_ratio_one() -> None:
    logprobs = row(math.log(1.5), math.log(1.5))
    loss = policy_losses.sapo_loss(logprobs, torch.zeros(1, 2).double(), row(1.0, -1.0))
    torch.testing.assert_close(loss, row(-2.489837, 2.393585), atol=1e-5, rtol=0)
    at_one = gradient(lambda x: policy_losses.sapo_loss(x, OLD, row(1.0, -1.0, 3.0)), OLD)
    torch.testing.assert_close(at_one, row(-1.0, 1.0, -3.0))


def test_dro_pulls_back_with_the_square_of_the_log_ratio() -> None:
    loss = policy_losses.dro_loss(OLD + GAPS, OLD, row(2.0), beta=4.0)
    torch.testing.assert_close(loss, -2.0 * (OLD + GAPS) + 2.0 * GAPS.square())
    with pytest.raises(ValueError, match="beta=0 must be above 0"):
        policy_losses.dro_loss(OLD, OLD, row(1.0), beta=0)


def test_dppo_drops_only_tokens_that_move_on_out_of_the_region() -> None:
    old, new = row(0.5, 0.5, 0.5, 0.5).log(), row(0.8, 0.2, 0.8, 0.2).log()
    signs = row(1.0, 1.0, -1.0, -1.0)
    loss = policy_losses.dppo_loss(new, old, signs, divergence="tv", threshold_low=0.2, threshold_high=0.2)
    # Upwards with A > 0 and downwards with A < 0 are dropped; moving back is not.
    assert loss[0, 0] == 0.0
    assert loss[0, 3] == 0.0
    assert loss[0, 1].item() == pytest.approx(-0.4 * math.log(0.2))
    assert loss[0, 2].item() == pytest.approx(1.6 * math.log(0.8))


def test_dppo_binary_kl_by_hand() -> None:
    old, new = row(0.5).log(), row(0.8).log()
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert policy_losses.binary_kl(old, new).item() == pytest.approx(expected)
    options = {"divergence": "kl", "threshold_low": 0.05}
    assert policy_losses.dppo_loss(new, old, row(1.0), threshold_high=expected - 0.01, **options).item() == 0.0
    assert policy_losses.dppo_loss(new, old, row(1.0), threshold_high=expected + 0.01, **options).item() != 0.0
    assert torch.isfinite(policy_losses.binary_kl(row(0.0), row(-50.0))).all()
    with pytest.raises(ValueError, match="divergence='js' is unknown. Choose one of tv, kl"):
        policy_losses.dppo_loss(new, old, row(1.0), divergence="js")


def covariance_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logprobs = -3 * torch.rand(8, 64, generator=generator, dtype=torch.float64)
    advantages = 2 * torch.randn(8, 1, generator=generator, dtype=torch.float64)
    mask = torch.rand(8, 64, generator=generator) < 0.8
    return logprobs, logprobs.clone(), advantages, mask


def test_clip_cov_zeroes_the_drawn_number_of_high_covariance_tokens_reproducibly() -> None:
    logprobs, old, advantages, mask = covariance_batch()

    def loss_of_seed(seed: int) -> torch.Tensor:
        return policy_losses.clip_cov_loss(
            logprobs, old, advantages, mask, generator=torch.Generator().manual_seed(seed), clip_cov_share=0.02
        )

    loss = loss_of_seed(0)
    zeroed = (loss == 0) & mask
    covariance = policy_losses.token_covariance(logprobs, advantages, mask)
    assert zeroed.sum().item() == int(0.02 * mask.sum().item())
    assert bool(((covariance > 1.0) & (covariance < 5.0))[zeroed].all())
    assert torch.equal(loss, loss_of_seed(0))
    assert not torch.equal(loss, loss_of_seed(1))


def test_clip_cov_without_candidates_is_the_clipped_loss() -> None:
    logprobs, old, advantages, mask = covariance_batch()
    loss = policy_losses.clip_cov_loss(
        logprobs, old, advantages, mask, generator=torch.Generator(), clip_cov_low=1e6, clip_cov_high=1e7
    )
    torch.testing.assert_close(loss, policy_losses.clipped_policy_loss(logprobs, old, advantages, clip_ratio_c=None))


def test_kl_cov_penalises_the_highest_covariance_only() -> None:
    old = row(-2.0, -1.0, -1.0, -9.0)
    logprobs = old + row(0.1, 0.1, -0.2, 0.5)
    advantages = row(-1.0, 0.0, 2.0, 9.0)
    mask = torch.tensor([[True, True, True, False]])
    loss = policy_losses.kl_cov_loss(logprobs, old, advantages, mask, kl_coef=10.0)
    plain = -advantages * (logprobs - old).exp()
    covariance = policy_losses.token_covariance(logprobs, advantages, mask)
    best = int(covariance.masked_fill(~mask, -math.inf).argmax())
    expected = plain.clone()
    expected[0, best] += 10.0 * (logprobs - old)[0, best].abs()
    torch.testing.assert_close(loss, expected)
    none = policy_losses.kl_cov_loss(logprobs, old, advantages, torch.zeros_like(mask))
    torch.testing.assert_close(none, plain)


def test_decoupled_loss_weighs_the_clip_around_the_old_policy() -> None:
    logprobs, old, rollout = row(-1.0, -1.0, -1.0), row(-1.1, -1.1, -1.1), row(-1.5, -3.0, 5.0)
    mask = torch.tensor([[True, True, False]])
    loss = policy_losses.decoupled_policy_loss(logprobs, old, rollout, row(1.0), mask, cap=2.0)
    torch.testing.assert_close(loss, -math.exp(0.1) * row(math.exp(0.4), 2.0, 0.0))
    same = policy_losses.decoupled_policy_loss(logprobs, old, old, row(1.0), torch.ones_like(mask))
    torch.testing.assert_close(same, policy_losses.clipped_policy_loss(logprobs, old, row(1.0)))


def test_bypass_reinforce_has_no_gradient_through_its_weight() -> None:
    rollout, mask = row(-1.5, -3.0, -1.0), all_true(OLD)
    actual = gradient(lambda x: policy_losses.bypass_reinforce_loss(x, rollout, row(2.0), mask), OLD)
    torch.testing.assert_close(actual, -2.0 * row(math.exp(0.5), 2.0, 1.0))


LOSSES = {
    "clipped": lambda lp, old, a, m: policy_losses.clipped_policy_loss(lp, old, a),
    "gspo": policy_losses.gspo_loss,
    "gmpo": policy_losses.gmpo_loss,
    "cispo": lambda lp, old, a, m: policy_losses.cispo_loss(lp, old, a),
    "sapo": lambda lp, old, a, m: policy_losses.sapo_loss(lp, old, a),
    "reinforce": lambda lp, old, a, m: policy_losses.reinforce_loss(lp, a),
    "dro": lambda lp, old, a, m: policy_losses.dro_loss(lp, old, a, beta=0.5),
    "dppo_tv": lambda lp, old, a, m: policy_losses.dppo_loss(lp, old, a),
    "dppo_kl": lambda lp, old, a, m: policy_losses.dppo_loss(lp, old, a, divergence="kl"),
    "decoupled": lambda lp, old, a, m: policy_losses.decoupled_policy_loss(lp, old, old, a, m),
    "vespo": policy_losses.vespo_loss,
    "m2po": policy_losses.m2po_loss,
    "clip_cov": lambda lp, old, a, m: policy_losses.clip_cov_loss(
        lp, old, a, m, generator=torch.Generator(), clip_cov_low=1e6, clip_cov_high=1e7
    ),
    "kl_cov": lambda lp, old, a, m: policy_losses.kl_cov_loss(lp, old, a, m, kl_coef=0.0),
}
CHOOSES_AMONG_ROWS = {"m2po"}


@pytest.mark.parametrize("name", LOSSES)
def test_rows_are_independent_padding_is_inert_and_dtype_stays(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    mask = torch.arange(7) < torch.tensor([7, 3, 5, 1])[:, None]
    old = -torch.rand(4, 7, generator=generator, dtype=torch.float64)
    logprobs = old + 0.3 * torch.randn(4, 7, generator=generator, dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [0.0]], dtype=torch.float64)
    whole = LOSSES[name](logprobs, old, advantages, mask)

    order = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(LOSSES[name](logprobs[order], old[order], advantages[order], mask[order]), whole[order])

    if name not in CHOOSES_AMONG_ROWS:
        split = [LOSSES[name](logprobs[i], old[i], advantages[i], mask[i]) for i in (slice(0, 1), slice(1, 4))]
        torch.testing.assert_close(torch.cat(split), whole)

    def pad(x: torch.Tensor, value: float = -5.0) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 2), value=value)

    padded = LOSSES[name](pad(logprobs), pad(old, -1.0), advantages, pad(mask, 0))
    torch.testing.assert_close(padded[:, :7][mask], whole[mask])
    per_token = LOSSES[name](logprobs, old, advantages.expand(4, 7), mask)
    torch.testing.assert_close(per_token[mask], whole[mask])
    assert LOSSES[name](logprobs.float(), old.float(), advantages.float(), mask).dtype is torch.float32


@pytest.mark.parametrize("name", LOSSES)
def test_advantage_zero_gives_no_gradient_at_the_old_policy(name: str) -> None:  # O22
    old = row(-1.0, -2.0)
    actual = gradient(lambda x: LOSSES[name](x, old, row(0.0), all_true(old)), old)
    assert actual.abs().max().item() == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_at_the_old_policy_every_loss_has_the_plain_policy_gradient(name: str) -> None:
    old = row(-1.0, -2.0)

    def total(x: torch.Tensor) -> torch.Tensor:
        mask = all_true(old)
        loss = LOSSES[name](x, old, row(1.5), mask)
        return aggregate_loss(loss, mask, mode="seq-mean-token-mean", num_tokens=2, num_sequences=1)

    torch.testing.assert_close(gradient(total, old), row(-0.75, -0.75))


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_log_probs_being_trained_have_a_gradient(name: str) -> None:
    old, advantages = row(-1.0, -2.0, -1.5).requires_grad_(), row(1.5).requires_grad_()
    logprobs = row(-1.1, -1.9, -1.5).requires_grad_()

    LOSSES[name](logprobs, old, advantages, all_true(old)).sum().backward()

    assert logprobs.grad is not None
    assert logprobs.grad.abs().sum() > 0
    assert old.grad is None or not old.grad.any()
    assert advantages.grad is None or not advantages.grad.any()


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_token_the_aggregated_loss_is_zero_and_finite(name: str) -> None:
    logprobs, old = row(-1.0, -2.0).requires_grad_(), row(-1.5, -1.5)
    mask = torch.zeros(1, 2, dtype=torch.bool)

    loss = aggregate_loss(LOSSES[name](logprobs, old, row(1.0), mask), mask, num_tokens=0, num_sequences=0)
    loss.backward()

    assert loss.item() == 0.0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"reinforce"}))
def test_shapes_that_differ_are_named(name: str) -> None:
    old, mask = row(-1.0, -2.0), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"old_logprobs \(1, 3\)"):
        LOSSES[name](old, row(-1.0, -2.0, -3.0), row(1.0), mask)
    with pytest.raises(ValueError, match=r"advantages has shape \(1, 3\)|advantages \(1, 3\)"):
        LOSSES[name](old, old, row(1.0, 1.0, 1.0), mask)
