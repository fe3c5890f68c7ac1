"""Fitting again: from a checkpoint, and with the same module."""

from __future__ import annotations

import logging

import lightning as L
import pytest
from iteration_recorder import IterationRecorder, are_equal, weights_of

from lit_rl.experience.loader import ExperienceLoader
from lit_rl.modules import GRPO


def resume(module, experiences, path, **options):
    """Fit from a checkpoint to one iteration more per experience."""
    remaining = iter(experiences)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module, ExperienceLoader(lambda: next(remaining), 1, 1), ckpt_path=path)
    return trainer


def test_a_resumed_run_takes_learning_rate_and_decay_from_the_configuration(
    tiny_model_folder, make_trajectories, make_experience, fit, tmp_path, caplog
):
    first = GRPO(tiny_model_folder, actor_lr=1e-3, weight_decay=0.5)
    fit(first, [make_experience(make_trajectories())]).save_checkpoint(tmp_path / "one.ckpt")
    recorder = IterationRecorder()
    module = GRPO(tiny_model_folder, actor_lr=4e-4, weight_decay=0.0, lr_warmup_iterations=3)

    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        trainer = resume(
            module,
            [make_experience(make_trajectories(seed=1))],
            tmp_path / "one.ckpt",
            max_epochs=2,
            callbacks=[recorder],
        )

    assert recorder.of("iteration") == [1]
    assert recorder.of("actor/lr") == pytest.approx([2e-4])  # the second of four warm-up iterations
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 0.0
    assert caplog.text.count("differ from the configuration's") == 1
    assert are_equal(recorder.start, weights_of(first))
    assert module.policy_version == 2


# O38 for the module: momentum, schedule and versions continue.
def test_a_resumed_run_equals_an_uninterrupted_one(
    tiny_model_folder, make_trajectories, make_experience, fit, tmp_path, caplog
):
    def experiences():
        return [make_experience(make_trajectories(seed=seed), iteration=seed) for seed in range(3)]

    def make():
        return GRPO(tiny_model_folder, actor_lr=1e-3, lr_warmup_iterations=4)

    whole, interrupted, resumed = make(), make(), make()
    fit(whole, experiences())
    fit(interrupted, experiences()[:1]).save_checkpoint(tmp_path / "one.ckpt")
    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        resume(resumed, experiences()[1:], tmp_path / "one.ckpt", max_epochs=3)

    assert are_equal(weights_of(whole), weights_of(resumed))
    assert whole.policy_version == resumed.policy_version == 3
    assert "differ from the configuration" not in caplog.text


def test_a_second_fit_of_the_same_module_starts_at_version_0(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    module = GRPO(tiny_model_folder, actor_lr=1e-3)
    for _ in range(2):
        fit(module, [make_experience(make_trajectories(seed=seed)) for seed in range(2)])
        assert module.policy_version == 2


def test_a_checkpoint_of_another_model_is_refused(tiny_model_folder):
    module = GRPO(tiny_model_folder)
    module.configure_model()
    weights = dict(module.state_dict())
    module.on_load_checkpoint({"state_dict": weights, "lit_rl_policy_version": 3})
    assert module.policy_version == 3

    others = {name.replace("layers.1.", "layers.9."): tensor for name, tensor in weights.items()}
    for checkpoint in ({"state_dict": others, "lit_rl_policy_version": 4}, {"state_dict": weights}):
        with pytest.raises(ValueError, match=r"The checkpoint lacks .* weights of model_name=.*ckpt_path"):
            module.on_load_checkpoint(checkpoint)
    assert module.policy_version == 3
