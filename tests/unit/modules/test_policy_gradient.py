"""The update of the policy-gradient base: accumulation, skipped steps, schedule, and reference."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch
from iteration_recorder import IterationRecorder, are_equal

from lit_rl.algorithms.aggregate import AGGREGATION_MODES
from lit_rl.modules import GRPO
from lit_rl.types import Trajectory


class GivenLoss(GRPO):
    """Every token of trajectory i has loss ``losses[i]`` and that times the gradient of its log-prob."""

    losses: list[float]

    def compute_advantages(self, experience):
        return torch.ones(len(experience.rewards))

    def policy_loss(self, logprobs, batch):
        losses = torch.tensor([self.losses[position] for position in batch.positions])
        return losses[:, None] * (1 + logprobs - logprobs.detach())


class NotFinite(GRPO):
    """Its loss is NaN in the iterations ``broken``."""

    broken: tuple[int, ...] = ()

    def policy_loss(self, logprobs, batch):
        loss = super().policy_loss(logprobs, batch)
        return loss * math.nan if self.current_epoch in self.broken else loss


def trajectory(group, tokens, reward=1.0):
    return Trajectory(
        row_id=group, group_id=group, prompt_ids=[5, 6], response_ids=list(range(10, 10 + tokens)),
        loss_mask=[1] * tokens, rollout_logprobs=[-4.0] * tokens, policy_versions=[0] * tokens, reward=reward,
    )  # fmt: skip


# O21, its two examples, with a micro-batch per trajectory.
@pytest.mark.parametrize(
    ("tokens", "losses", "mode", "expected"),
    [
        ([4, 1], [1.0, 3.0], "token-mean", 1.4),  # mean of means would be 2
        ([2, 6], [2.0, 1.0], "token-mean", 1.25),
        ([4, 1], [1.0, 3.0], "token-sum", 7.0),
        ([4, 1], [1.0, 3.0], "seq-mean-token-sum", 3.5),
        ([4, 1], [1.0, 3.0], "seq-mean-token-sum-norm", 0.35),
        ([4, 1], [1.0, 3.0], "seq-mean-token-mean", 2.0),
        ([4, 1, 3], [1.0, 3.0, 2.0], "prompt-mean", 1.7),  # groups of 5 and 3 tokens: (7 / 5 + 2) / 2
    ],
)
def test_the_loss_of_split_mini_batches_is_that_of_the_whole(
    tiny_model_folder, make_experience, fit, tokens, losses, mode, expected
):
    recorder = IterationRecorder()
    module = GivenLoss(tiny_model_folder, actor_lr=1e-4, loss_agg_mode=mode, loss_scale=10.0)
    module.losses = losses
    trajectories = [trajectory(group, count) for group, count in zip("aab", tokens, strict=False)]

    fit(module, [make_experience(trajectories, micro_batch_size=1)], callbacks=[recorder])

    assert recorder.metrics[0]["actor/pg_loss"] == pytest.approx(expected, abs=1e-6)


# O21: dynamic and fixed micro-batch sizes, with prompts computed once or each time.
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_the_gradient_does_not_depend_on_how_a_mini_batch_is_split(
    tiny_model_folder, make_trajectories, make_experience, fit, mode
):
    class Double(GRPO):
        """The reference: its backbone computes in float64, so that only one side of each comparison is rounded."""

        def configure_model(self):
            super().configure_model()
            self.actor.double()

    splits = [
        (10_000, None, False),
        (10_000, None, False),
        (40, None, False),
        (24, None, False),
        (40, 1, False),
        (60, 3, False),
        (40, None, True),
    ]
    gradients = []
    for max_tokens, micro_batch_size, share_prompts in splits:
        recorder = IterationRecorder()
        experience = make_experience(
            make_trajectories(), max_tokens=max_tokens, micro_batch_size=micro_batch_size, share_prompts=share_prompts
        )
        module = (GRPO if gradients else Double)(
            tiny_model_folder, actor_lr=1e-4, loss_agg_mode=mode, loss_scale=14.0, max_grad_norm=1e9,
            kl_loss_coef=0.1, entropy_coef=0.01,
        )  # fmt: skip
        fit(module, [experience], callbacks=[recorder])
        gradients.append(recorder.gradients[0])

    whole = torch.cat([gradient.flatten() for gradient in gradients[0].values()])
    for split in gradients[1:]:
        difference = torch.cat([gradient.flatten() for gradient in split.values()]) - whole
        # In token-sum the gradient is some hundred times that of token-mean, and so is float32's rounding of it.
        assert difference.abs().max() <= 1e-6 * max(1.0, whole.norm())
    assert whole.abs().max() > 1e-3


# O22: AdamW's momentum would move the weights on a zero gradient.
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_equal_rewards_leave_the_weights_as_they_are_after_ordinary_steps(
    tiny_model_folder, make_trajectories, make_experience, fit, num_mini_batches
):
    recorder = IterationRecorder()
    experiences = [
        make_experience(make_trajectories(seed=seed), num_mini_batches=num_mini_batches) for seed in range(3)
    ]
    experiences.append(make_experience(make_trajectories(rewards=[0.3] * 20), num_mini_batches=num_mini_batches))
    module = GRPO(tiny_model_folder, actor_lr=1e-3)

    trainer = fit(module, experiences, callbacks=[recorder])

    assert not any(are_equal(a, b) for a, b in zip(recorder.weights[:2], recorder.weights[1:3], strict=True))
    assert are_equal(recorder.weights[2], recorder.weights[3])
    assert recorder.of("critic/zero_spread_group_share")[3] == 1.0
    assert recorder.of("actor/skipped_weightless_steps") == [0, 0, 0, num_mini_batches]
    assert trainer.global_step == 3 * num_mini_batches
    assert module.policy_version == 4


# O22, with the only advantage on a response without tokens.
def test_an_advantage_without_tokens_moves_nothing(tiny_model_folder, make_experience, make_trajectories, fit):
    class OnlyTheEmptyOne(GRPO):
        def compute_advantages(self, experience):
            if self.current_epoch == 0:
                return super().compute_advantages(experience)
            return (experience.loss_tokens == 0).float()

    recorder = IterationRecorder()
    experiences = [make_experience(make_trajectories(seed=seed)) for seed in range(2)]

    fit(OnlyTheEmptyOne(tiny_model_folder, actor_lr=1e-3), experiences, callbacks=[recorder])

    assert are_equal(recorder.weights[0], recorder.weights[1])
    assert recorder.of("actor/skipped_weightless_steps") == [0, 1]


def test_a_kl_term_still_learns_where_rewards_are_equal(tiny_model_folder, make_trajectories, make_experience, fit):
    recorder = IterationRecorder()
    experiences = [make_experience(make_trajectories()), make_experience(make_trajectories(rewards=[0.3] * 20))]

    fit(GRPO(tiny_model_folder, actor_lr=1e-3, kl_loss_coef=0.5), experiences, callbacks=[recorder])

    assert not are_equal(recorder.weights[0], recorder.weights[1])
    assert recorder.of("actor/skipped_weightless_steps") == [0, 0]


# O16
@pytest.mark.parametrize("kl_loss_coef", [0.0, 0.1])
@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_only_empty_responses_skip_the_step_and_log_finite_numbers(
    tiny_model_folder, make_trajectories, make_experience, fit, num_mini_batches, kl_loss_coef
):
    recorder = IterationRecorder()
    empty = [trajectory(group, 0, reward) for group in "ab" for reward in (0.0, 1.0)]
    experiences = [
        make_experience(trajectories, num_mini_batches=num_mini_batches)
        for trajectories in (make_trajectories(), empty)
    ]

    fit(GRPO(tiny_model_folder, actor_lr=1e-3, kl_loss_coef=kl_loss_coef), experiences, callbacks=[recorder])

    assert are_equal(recorder.weights[0], recorder.weights[1])
    assert recorder.of("actor/skipped_weightless_steps") == [0, num_mini_batches]
    assert all(math.isfinite(value) for value in recorder.metrics[1].values())


def test_an_iteration_without_a_trajectory_is_an_iteration(tiny_model_folder, make_trajectories, make_experience, fit):
    recorder = IterationRecorder()
    experiences = [make_experience(trajectories, num_mini_batches=2) for trajectories in (make_trajectories(), [])]
    experiences[1].group_ids = experiences[1].group_ids.long()  # as the collector makes it
    module = GRPO(tiny_model_folder, actor_lr=1e-3)

    fit(module, experiences, callbacks=[recorder])

    assert recorder.of("actor/skipped_weightless_steps") == [0, 2]
    assert recorder.of("iteration") == [0, 1]
    assert module.policy_version == 2


def test_a_loss_that_is_not_finite_skips_the_step_and_training_goes_on(
    tiny_model_folder, make_trajectories, make_experience, fit, caplog
):
    recorder = IterationRecorder()
    module = NotFinite(tiny_model_folder, actor_lr=1e-3, max_skipped_steps=2)
    module.broken = (1, 3)
    experiences = [make_experience(make_trajectories(seed=seed)) for seed in range(5)]

    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        fit(module, experiences, callbacks=[recorder])

    unchanged = [are_equal(a, b) for a, b in zip(recorder.weights, recorder.weights[1:], strict=False)]
    assert unchanged == [True, False, True, False]
    assert [recorder.of("actor/skipped_not_finite_steps")[i] for i in (1, 3)] == [1.0, 1.0]
    assert caplog.text.count("Optimizer step skipped: loss nan") == 2
    assert all(torch.isfinite(tensor).all() for tensor in recorder.weights[-1].values())


def test_too_many_skipped_steps_in_a_row_stop_the_run(tiny_model_folder, make_trajectories, make_experience, fit):
    module = NotFinite(tiny_model_folder, actor_lr=1e-3, max_skipped_steps=2)
    module.broken = (1, 2, 3)
    experiences = [make_experience(make_trajectories(seed=seed)) for seed in range(4)]

    with pytest.raises(RuntimeError, match=r"2 optimizer steps in a row .*model\.max_skipped_steps=2\)\. Lower"):
        fit(module, experiences)

    # A later fit counts from the start: one bad step is not the third in a row.
    module.broken = (0,)
    fit(module, [make_experience(make_trajectories())])


def test_the_learning_rate_rises_by_iteration_and_not_by_step(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    recorder = IterationRecorder()
    experiences = [make_experience(make_trajectories(seed=seed), num_mini_batches=2) for seed in range(5)]

    fit(GRPO(tiny_model_folder, actor_lr=4e-3, lr_warmup_iterations=3), experiences, callbacks=[recorder])

    assert recorder.of("actor/lr") == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3])


def test_the_gradient_is_clipped_and_its_norm_logged_from_before(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    norms = []
    for limit in (1e9, 0.01):
        recorder = IterationRecorder()
        module = GRPO(tiny_model_folder, actor_lr=1e-3, max_grad_norm=limit)
        fit(module, [make_experience(make_trajectories())], callbacks=[recorder])
        norms.append(torch.cat([gradient.flatten() for gradient in recorder.gradients[0].values()]).norm().item())
        assert recorder.of("actor/grad_norm") == pytest.approx([norms[0]], rel=1e-4)

    assert norms[0] > 0.01
    assert norms[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("with_zero_spread_groups", [False, True])
def test_the_first_ratio_is_1_where_old_log_probs_were_scored(
    tiny_model_folder, make_trajectories, make_experience, fit, with_zero_spread_groups
):
    recorder = IterationRecorder()
    rewards = [0.5] * 8 + [0.0, 1.0] * 6 if with_zero_spread_groups else None
    experience = make_experience(make_trajectories(rewards=rewards), num_mini_batches=2, ppo_epochs=2, max_tokens=60)

    fit(GRPO(tiny_model_folder, actor_lr=1e-2), [experience], callbacks=[recorder])

    assert "old_logprobs" in experience.columns
    assert recorder.of("actor/first_ratio_deviation")[0] < 1e-6
    # Later mini-batches do see another policy.
    assert recorder.of("actor/ppo_kl")[0] != 0.0


def test_one_update_per_iteration_scores_no_old_log_probs(tiny_model_folder, make_trajectories, make_experience, fit):
    recorder = IterationRecorder()
    experience = make_experience(make_trajectories())

    fit(GRPO(tiny_model_folder, actor_lr=1e-3), [experience], callbacks=[recorder])

    assert set(experience.columns) == {"rollout_logprobs"}
    assert recorder.of("actor/ppo_kl") == [0.0]


def test_a_reference_is_loaded_only_for_a_kl_term_and_is_in_no_checkpoint(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    with_kl, without = [GRPO(tiny_model_folder, actor_lr=1e-2, kl_loss_coef=coef) for coef in (0.1, 0.0)]
    recorder = IterationRecorder()
    experience = make_experience(make_trajectories(), num_mini_batches=2)
    trainer = fit(with_kl, [experience], callbacks=[recorder])
    start = recorder.start
    fit(without, [make_experience(make_trajectories())])

    assert without.reference is None
    assert with_kl.state_dict().keys() == without.state_dict().keys()
    assert all(name.startswith("actor.") for name in with_kl.state_dict())
    reference = dict(with_kl.reference.network.named_parameters())
    assert not any(parameter.requires_grad for parameter in reference.values())
    # It stays what the policy started from, while the policy has moved.
    assert all(torch.equal(reference[name.removeprefix("network.")], start[name]) for name in start)
    optimized = trainer.optimizers[0].param_groups[0]["params"]
    assert {id(p) for p in optimized}.isdisjoint({id(p) for p in reference.values()})


def test_the_kl_term_is_0_against_itself_and_grows_with_distance(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    recorder = IterationRecorder()
    experiences = [make_experience(make_trajectories(seed=seed)) for seed in range(2)]

    fit(GRPO(tiny_model_folder, actor_lr=1e-2, kl_loss_coef=0.1), experiences, callbacks=[recorder])

    first, second = recorder.of("actor/kl_loss")
    assert first == pytest.approx(0.0, abs=1e-6)
    assert second > 1e-4


def test_a_gap_to_the_engine_is_warned_about(tiny_model_folder, make_trajectories, make_experience, fit, caplog):
    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        fit(GRPO(tiny_model_folder, actor_lr=1e-3, logprob_gap_warning=0.01), [make_experience(make_trajectories())])

    assert "engine's log-probs differ from the trainer's" in caplog.text
    assert "model.rollout_correction=token-tis" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"actor_lr": 0.0}, r"model\.actor_lr=0\.0 must be above 0"),
        ({"max_grad_norm": 0.0}, r"model\.max_grad_norm=0\.0 must be above 0"),
        ({"loss_agg_mode": "mean"}, r"model\.loss_agg_mode='mean' must be one of token-mean"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, r"needs model\.loss_scale"),
        ({"clip_ratio_low": 1.0}, r"model\.clip_ratio_low=1\.0 must be above 0 and below 1"),
        ({"clip_ratio_high": float("nan")}, r"model\.clip_ratio_high=nan must be above 0, and finite"),
        ({"clip_ratio_c": 0.5}, r"model\.clip_ratio_c=0\.5 must be above 1"),
        ({"actor_lr": float("nan")}, r"model\.actor_lr=nan must be above 0, and finite"),
        ({"actor_lr": float("inf")}, r"model\.actor_lr=inf must be above 0, and finite"),
        ({"betas": (0.9, 2.0)}, r"model\.betas=2\.0 must be at least 0 and below 1"),
        ({"lr_warmup_iterations": -1}, r"model\.lr_warmup_iterations=-1 must be at least 0"),
        ({"kl_loss_coef": -0.1}, r"model\.kl_loss_coef=-0\.1 must be at least 0"),
        ({"kl_loss_type": "k4"}, r"model\.kl_loss_type='k4' must be one of k1"),
        ({"entropy_coef": float("nan")}, r"model\.entropy_coef=nan must be finite"),
        ({"rollout_correction": "tis"}, r"model\.rollout_correction='tis' must be one of off, token-tis"),
        ({"rollout_correction_cap": -1.0}, r"model\.rollout_correction_cap=-1\.0 must be above 0"),
        ({"max_skipped_steps": 0}, r"model\.max_skipped_steps=0 must be at least 1"),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_is_loaded(options, words):
    with pytest.raises(ValueError, match=words):
        GRPO("no/such/model", **options)


def test_groups_of_one_are_warned_about_at_start(caplog):  # O23 (a)
    for group_size, is_warned in ((1, True), (2, False)):
        caplog.clear()
        module = GRPO("no/such/model")
        data = SimpleNamespace(group_size=group_size)
        module.trainer = SimpleNamespace(current_epoch=0, datamodule=data, strategy=None)
        with caplog.at_level(logging.WARNING, logger="lit_rl"):
            module.setup("fit")
        assert ("data.group_size=1" in caplog.text) == is_warned
