"""Rollout corrections by preset: weights, rejections, bypass, and what the loss is divided by."""

from __future__ import annotations

import math

import pytest
import torch
from iteration_recorder import IterationRecorder
from method_fakes import micro_batch

from lit_rl.metrics.policy import PolicyMetrics
from lit_rl.modules import GRPO
from lit_rl.modules.rollout_corrector import RolloutCorrector

# O26: the last token is masked.
TRAINER, ENGINE, MASK = [[-1.0, -2.0, -0.5, -9.0]], [[-1.2, -4.0, -0.5, 0.0]], [[1, 1, 1, 0]]


def corrected(preset, cap=2.0, current=None):
    """Token losses and metrics, where the algorithm's own loss is 1 at every token."""
    metrics = PolicyMetrics()
    batch = micro_batch(TRAINER, [1.0], mask=MASK, rollout=ENGINE)
    logprobs = torch.tensor(TRAINER if current is None else current)
    loss = RolloutCorrector(preset, cap, metrics).token_loss(logprobs, batch, lambda new, _: torch.ones_like(new))
    return loss[0, :3], metrics.compute()


def test_off_changes_nothing():
    loss, metrics = corrected("off")

    assert loss.tolist() == [1.0, 1.0, 1.0]
    assert metrics == {}


# O26
def test_token_tis_multiplies_by_truncated_weights():
    loss, metrics = corrected("token-tis")

    torch.testing.assert_close(loss, torch.tensor([math.exp(0.2), 2.0, 1.0]))
    assert metrics["rollout_corr/weight_mean"] == pytest.approx(1.4071, abs=1e-4)
    assert corrected("token-tis", cap=1.1)[0].tolist() == pytest.approx([1.1, 1.1, 1.0])


def test_icepop_drops_what_lies_outside_its_band_and_keeps_the_denominator():
    loss, _ = corrected("icepop")

    # exp(2) is above 5. The loss is 0 there; what the sum is divided by stays the number of tokens.
    torch.testing.assert_close(loss, torch.tensor([math.exp(0.2), 0.0, 1.0]))


def test_rejection_drops_whole_sequences_without_weights():
    loss, metrics = corrected("geo-rejection")

    assert loss.tolist() == [0.0, 0.0, 0.0]
    assert metrics["rollout_corr/rejected_share"] == 1.0


def test_bypass_with_weights_is_reinforce_of_the_current_policy():
    loss, _ = corrected("bypass-token-tis", current=[[-1.1, -2.0, -0.5, -9.0]])

    torch.testing.assert_close(loss, torch.tensor([math.exp(0.1) * 1.1, 2.0 * 2.0, 0.5]))


def run(folder, experience, fit, **options):
    recorder = IterationRecorder()
    fit(GRPO(folder, actor_lr=1e-3, **options), [experience], callbacks=[recorder])
    return recorder


@pytest.mark.parametrize("preset", ["token-tis-normalized", "bypass", "seq-tis"])
def test_a_preset_trains_and_does_not_depend_on_micro_batches(
    tiny_model_folder, make_trajectories, make_experience, fit, preset
):
    runs = [
        run(
            tiny_model_folder,
            make_experience(make_trajectories(), max_tokens=max_tokens, share_prompts=False),
            fit,
            rollout_correction=preset,
            rollout_correction_cap=50.0,
        )
        for max_tokens in (1000, 24)
    ]

    for name, gradient in runs[0].gradients[0].items():
        torch.testing.assert_close(runs[1].gradients[0][name], gradient, atol=1e-6, rtol=1e-4)
    # The gap is measured against the engine in every mode.
    assert runs[0].of("rollout_corr/logprob_gap_mean")[0] > 0.01


def test_bypass_scores_no_old_log_probs_and_normalised_weights_do(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    for preset, num_mini_batches, is_scored in [("bypass", 2, False), ("token-tis-normalized", 1, True)]:
        experience = make_experience(make_trajectories(), num_mini_batches=num_mini_batches)
        # With an entropy term every token takes part in the update, and so in the logged mean.
        recorder = run(tiny_model_folder, experience, fit, rollout_correction=preset, entropy_coef=1e-9)
        assert ("old_logprobs" in experience.columns) is is_scored
        if is_scored:
            assert recorder.of("rollout_corr/weight_mean") == pytest.approx([1.0], abs=1e-5)
