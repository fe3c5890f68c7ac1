"""Modules that differ in their loss: each option reaches the formula, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from method_fakes import micro_batch

from lit_rl.modules import (
    CISPO,
    DAPO,
    DPPO,
    DRO,
    GMPO,
    GPG,
    GSPO,
    LUSPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    DecoupledPPO,
    KLCov,
)

UP, DOWN = math.log(1.5), math.log(0.5)  # ratios of 1.5 and 0.5


def loss_of(module, logprobs, batch):
    loss = module.policy_loss(torch.tensor(logprobs, requires_grad=True), batch)
    assert loss.shape == batch.old_logprobs.shape
    return loss


def test_dapo_clips_higher_above_than_below():
    batch = micro_batch([[0.0, 0.0], [0.0, 0.0]], [1.0, -1.0])
    loss = loss_of(DAPO("unused"), [[UP, DOWN], [UP, DOWN]], batch)

    torch.testing.assert_close(loss, torch.tensor([[-1.28, -0.5], [1.5, 0.8]]))


def test_gspo_clips_the_mean_ratio_of_the_sequence():
    # Mean log-ratios: 0.1 and 0.3; masked tokens do not count.
    batch = micro_batch([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [1.0, 1.0], mask=[[1, 1, 0], [1, 1, 1]])
    module = GSPO("unused", clip_ratio_low=0.2, clip_ratio_high=0.2)
    loss = loss_of(module, [[0.1, 0.1, 5.0], [0.2, 0.3, 0.4]], batch)

    torch.testing.assert_close(loss[0, :2], torch.tensor([-math.exp(0.1)] * 2))
    torch.testing.assert_close(loss[1], torch.tensor([-1.2] * 3))
    assert module.loss_agg_mode == "seq-mean-token-mean"


def test_gmpo_takes_the_geometric_mean_of_clipped_ratios():
    batch = micro_batch([[0.0, 0.0, 0.0]], [1.0])
    loss = loss_of(GMPO("unused"), [[0.1, 0.6, -0.1]], batch)

    torch.testing.assert_close(loss, torch.full((1, 3), -math.exp((0.1 + 0.4 - 0.1) / 3)))


def test_cispo_keeps_a_gradient_where_it_clips():
    logprobs = torch.tensor([[UP, DOWN]], requires_grad=True)
    CISPO("unused").policy_loss(logprobs, micro_batch([[0.0, 0.0]], [2.0])).sum().backward()

    # The weight 1.5 is clipped to 1.2; below there is no bound.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-2.4, -1.0]]))


def test_sapo_fades_by_the_sign_of_the_advantage():
    loss = loss_of(SAPO("unused"), [[UP], [UP]], micro_batch([[0.0], [0.0]], [1.0, -1.0]))

    torch.testing.assert_close(loss, torch.tensor([[-2.489837], [2.393585]]))


def test_dppo_lets_a_rare_token_multiply_and_holds_a_likely_one():
    # Probabilities 0.01 to 0.05 (ratio 5, change 0.04), and 0.5 to 0.9 (ratio 1.8, change 0.4).
    logprobs = torch.tensor([[math.log(0.05), math.log(0.9)]], requires_grad=True)
    batch = micro_batch([[math.log(0.01), math.log(0.5)]], [1.0])
    DPPO("unused", ratio_cap=3.0).policy_loss(logprobs, batch).sum().backward()

    torch.testing.assert_close(logprobs.grad, torch.tensor([[-3.0, 0.0]]))


def test_gpg_has_no_ratio():
    loss = loss_of(GPG("unused"), [[-1.0, -2.0]], micro_batch([[-5.0, -5.0]], [0.5]))

    torch.testing.assert_close(loss, torch.tensor([[0.5, 1.0]]))


def test_dro_pulls_back_by_the_squared_log_ratio():
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss = DRO("unused", beta=0.5).policy_loss(logprobs, micro_batch([[-1.4, -2.0]], [0.25]))
    loss.sum().backward()

    # -(A logprob) + 0.25 * 0.4^2, and its gradient -A + beta * log r.
    torch.testing.assert_close(loss.detach(), torch.tensor([[0.25 + 0.04, 0.5]]))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.25 + 0.5 * 0.4, -0.25]]))
    assert DRO("unused").weighs_every_token  # the pull has no advantage in it


def test_luspo_weighs_gspos_sequences_by_their_length():
    module = LUSPO("unused", clip_ratio_low=0.2, clip_ratio_high=0.2)
    batch = micro_batch([[0.0, 0.0, 0.0]], [1.0], mask=[[1, 1, 0]])

    torch.testing.assert_close(loss_of(module, [[0.1, 0.1, 5.0]], batch)[0, :2], torch.tensor([-math.exp(0.1)] * 2))
    assert module.loss_agg_mode == "seq-mean-token-sum"


def test_vespo_fades_by_the_ratio_of_the_whole_sequence():
    # W = exp(0.2 - 0.1 + nothing from the masked token); phi = e^lambda W^k e^(-lambda W).
    logprobs = torch.tensor([[-1.0, -2.0, 0.0]] * 2, requires_grad=True)
    batch = micro_batch([[-1.2, -1.9, -9.0]] * 2, [1.0, -1.0], mask=[[1, 1, 0]] * 2)
    VESPO("unused").policy_loss(logprobs, batch).sum().backward()
    w = math.exp(0.1)
    up, down = math.exp(3 + 2 * 0.1 - 3 * w), math.exp(2 + 3 * 0.1 - 2 * w)

    torch.testing.assert_close(logprobs.grad[:, :2], torch.tensor([[-up, -up], [down, down]]))
    on_policy = VESPO("unused").policy_loss(torch.tensor([[-1.2]]), micro_batch([[-1.2]], [2.0]))
    torch.testing.assert_close(on_policy, torch.tensor([[2.4]]))


def test_m2po_drops_the_furthest_tokens_until_the_second_moment_is_small():
    # Squared log-ratios 0.01, 0.09, 0.64 and a masked one; means of the smallest one, two, three: 0.01, 0.05, 0.2467.
    batch = micro_batch([[0.0, 0.0, 0.0, 0.0]], [2.0], mask=[[1, 1, 1, 0]])
    loss = loss_of(M2PO("unused", m2_threshold=0.06), [[-0.1, 0.3, -0.8, 5.0]], batch)

    torch.testing.assert_close(loss, torch.tensor([[-2 * math.exp(-0.1), -2 * math.exp(0.3), 0.0, 0.0]]))
    everything = loss_of(M2PO("unused", m2_threshold=0.25), [[-0.1, 0.3, -0.8, 5.0]], batch)
    assert (everything != 0).tolist() == [[True, True, True, False]]
    nothing = loss_of(M2PO("unused", m2_threshold=0.005), [[-0.1, 0.3, -0.8, 5.0]], batch)
    assert not nothing.any()
    assert M2PO("unused").weighs_every_token


def test_kl_cov_holds_the_token_of_highest_covariance():
    # Covariance is largest at the last token of the first row: likely, and of high advantage.
    batch = micro_batch([[-2.0, -0.5], [-1.0, -1.0]], [1.0, -1.0])
    loss = loss_of(KLCov("unused", kl_coef=10.0), [[-2.0, -0.4], [-1.0, -1.0]], batch)

    torch.testing.assert_close(loss, torch.tensor([[-1.0, -math.exp(0.1) + 1.0], [1.0, 1.0]]))


def test_clip_cov_leaves_the_same_tokens_out_every_time():
    torch.manual_seed(0)
    batch = micro_batch(torch.randn(4, 8).tolist(), [2.0, -2.0, 2.0, -2.0])
    module = ClipCov("unused", clip_cov_share=0.1, clip_cov_low=0.0, clip_cov_high=100.0)

    losses = [loss_of(module, batch.old_logprobs.tolist(), batch) for _ in range(2)]

    assert torch.equal(losses[0], losses[1])
    assert int((losses[0] == 0).sum()) == 3  # a tenth of 32, rounded down


def test_covariances_need_tokens_without_an_advantage_too():
    assert ClipCov("unused").weighs_every_token
    assert KLCov("unused").weighs_every_token
    assert not GSPO("unused").weighs_every_token


def test_decoupled_ppo_weighs_the_clipped_loss_and_always_scores_old_log_probs(make_experience, make_trajectories):
    # pi_old / pi_rollout is 1.5 and, capped, 2.
    batch = micro_batch([[0.0, 0.0]], [1.0], rollout=[[-UP, -math.log(4)]])
    module = DecoupledPPO("unused")
    loss = loss_of(module, [[0.1, UP]], batch)

    torch.testing.assert_close(loss, torch.tensor([[-1.5 * math.exp(0.1), -2 * 1.2]]))
    assert module.needs_old_logprobs(make_experience(make_trajectories()))
    with pytest.raises(ValueError, match=r"model\.rollout_correction='icepop': DecoupledPPO has its own"):
        DecoupledPPO("unused", rollout_correction="icepop")


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (GSPO, {"clip_ratio_low": 2.0}, r"model\.clip_ratio_low=2\.0 must be at least 0 and at most 1"),
        (GMPO, {"clip_ratio_high": -1.0}, r"model\.clip_ratio_high=-1\.0 must be at least 0"),
        (SAPO, {"tau_positive": 0.0}, r"model\.tau_positive=0\.0 must be above 0"),
        (DAPO, {"clip_ratio_c": 1.0}, r"model\.clip_ratio_c=1\.0 must be above 1"),
        (ClipCov, {"clip_cov_low": 6.0}, r"model\.clip_cov_high=5\.0 must be above 6"),
        (DPPO, {"divergence": "js"}, r"model\.divergence='js' must be one of tv, kl"),
        (DRO, {"beta": 0.0}, r"model\.beta=0\.0 must be above 0"),
        (VESPO, {"lambda_negative": 0.0}, r"model\.lambda_negative=0\.0 must be above 0"),
        (VESPO, {"k_positive": -1.0}, r"model\.k_positive=-1\.0 must be at least 0"),
        (M2PO, {"m2_threshold": float("nan")}, r"model\.m2_threshold=nan must be above 0, and finite"),
        (GPG, {"loss_agg_mode": "mean"}, r"model\.loss_agg_mode='mean' must be one of token-mean"),
    ],
)
def test_options_out_of_range_name_the_option(cls, options, message):
    with pytest.raises(ValueError, match=message):
        cls("unused", **options)
