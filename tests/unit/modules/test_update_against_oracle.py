"""The module's update against a plain float64 GRPO, whatever the packing, the budget and the mini-batches."""

import pytest
import torch
from grpo_oracle import oracle_weights
from transformers import AutoModelForCausalLM

from lit_rl.modules import GRPO

LR = 1e-3
# AdamW divides a gradient by its own size: with the usual 1e-8 an element whose gradient is nearly 0 turns float32's
# rounding into a step of the learning rate's size, and no implementation could match.
EPS = 1e-3


def double(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def mini_batches_of(experience):
    return [
        [i for indices in mini.micro_batches[0] for i in indices]
        for one_pass in experience.plan.mini_batches
        for mini in one_pass
    ]


def assert_same_weights(module, expected, start):
    """Relative to the weights within 1e-6, and relative to how far they moved within float32's reach."""
    for name, parameter in module.actor.network.named_parameters():
        got, want = parameter.detach().double(), expected[name]
        assert (got - want).norm() <= 1e-6 * want.norm(), name
        assert (want - start[name].double()).norm() > 1e-4 * want.norm(), f"{name} did not move: the test shows nothing"


@pytest.mark.parametrize(
    ("num_mini_batches", "ppo_epochs", "max_tokens", "micro_batch_size", "share_prompts"),
    [
        (1, 1, 400, None, True),
        (1, 1, 400, None, False),
        (1, 1, 24, None, False),
        (1, 1, 40, 2, True),
        (3, 1, 60, None, True),
        (2, 2, 48, None, False),
    ],  # fmt: skip
)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_update_equals_the_float64_oracle(
    tiny_model_folder, make_trajectories, make_experience, fit, num_mini_batches, ppo_epochs, max_tokens,
    micro_batch_size, share_prompts, mode,
):  # fmt: skip
    trajectories = make_trajectories()
    experience = make_experience(
        trajectories, num_mini_batches=num_mini_batches, ppo_epochs=ppo_epochs, max_tokens=max_tokens,
        micro_batch_size=micro_batch_size, share_prompts=share_prompts, temperature=0.7,
    )  # fmt: skip
    model = double(tiny_model_folder)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = oracle_weights(
        model, trajectories, mini_batches_of(experience), lr=LR, eps=EPS, temperature=0.7, clip=(0.2, 0.2), mode=mode
    )
    module = GRPO(tiny_model_folder, actor_lr=LR, adam_eps=EPS, loss_agg_mode=mode, clip_ratio_c=None)

    fit(module, [experience])

    assert_same_weights(module, expected, start)


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"])
def test_update_in_every_other_mode_equals_the_float64_oracle(
    tiny_model_folder, make_trajectories, make_experience, fit, mode
):
    trajectories = make_trajectories(seed=2)
    experience = make_experience(trajectories, num_mini_batches=2, max_tokens=60)
    model = double(tiny_model_folder)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = oracle_weights(
        model, trajectories, mini_batches_of(experience), lr=LR, eps=EPS, temperature=1.0, clip=(0.2, 0.2), mode=mode,
        loss_scale=14.0,
    )  # fmt: skip
    module = GRPO(tiny_model_folder, actor_lr=LR, adam_eps=EPS, loss_agg_mode=mode, loss_scale=14.0, clip_ratio_c=None)

    fit(module, [experience])

    assert_same_weights(module, expected, start)


def test_update_with_a_kl_term_equals_the_float64_oracle(tiny_model_folder, make_trajectories, make_experience, fit):
    trajectories = make_trajectories(seed=4)
    experience = make_experience(trajectories, num_mini_batches=2)
    model = double(tiny_model_folder)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = oracle_weights(
        model, trajectories, mini_batches_of(experience), lr=LR, eps=EPS, temperature=1.0, clip=(0.2, 0.2), kl_coef=0.3,
        reference=double(tiny_model_folder),
    )  # fmt: skip
    module = GRPO(tiny_model_folder, actor_lr=LR, adam_eps=EPS, kl_loss_coef=0.3, clip_ratio_c=None)

    fit(module, [experience])

    assert_same_weights(module, expected, start)
