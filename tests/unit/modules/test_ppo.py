"""PPO's joint update of actor and critic against a plain float64 one, its warm-up, and its KL controller."""

from __future__ import annotations

import pytest
import torch
from iteration_recorder import IterationRecorder, are_equal
from lightning.pytorch.callbacks import Callback
from ppo_oracle import ValueModel, oracle_ppo
from transformers import AutoModelForCausalLM

from lit_rl.experience.batch import MiniBatch
from lit_rl.models import Critic, load_causal_lm
from lit_rl.modules import PFPPO, PPO, VAPO, OptimalTokenBaseline

LR, CRITIC_LR = 1e-3, 2e-3
EPS = 1e-3  # see test_update_against_oracle.py


def double(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def mini_batches_of(experience):
    passes = experience.plan.mini_batches
    return [[i for part in mini.micro_batches[0] for i in part] for one_pass in passes for mini in one_pass]


def assert_same(network, expected, start, tolerance):
    for name, want in expected.named_parameters():
        got = dict(network.named_parameters())[name].detach().double()
        assert (got - want).norm() <= tolerance * want.norm(), name
        assert (want - start[name].double()).norm() > 1e-4 * want.norm(), f"{name} did not move"


@pytest.mark.parametrize(
    ("mode", "num_mini_batches", "ppo_epochs", "max_tokens", "share_prompts", "kl_coef"),
    [
        ("token-mean", 1, 1, 400, True, 0.0),
        ("token-mean", 2, 1, 40, True, 0.5),
        ("seq-mean-token-mean", 2, 2, 48, False, 0.0),
        ("seq-mean-token-sum", 2, 1, 60, True, 0.0),
        ("seq-mean-token-sum-norm", 2, 1, 60, False, 0.0),
        ("prompt-mean", 2, 1, 60, True, 0.0),
        ("token-sum", 1, 2, 60, True, 0.0),
    ],
)
def test_the_joint_update_equals_the_float64_oracle(
    tiny_model_folder, make_trajectories, make_experience, fit, mode, num_mini_batches, ppo_epochs, max_tokens,
    share_prompts, kl_coef,
):  # fmt: skip
    trajectories = make_trajectories(seed=1)
    experience = make_experience(
        trajectories, num_mini_batches=num_mini_batches, ppo_epochs=ppo_epochs, max_tokens=max_tokens,
        share_prompts=share_prompts,
    )  # fmt: skip
    actor = double(tiny_model_folder)
    critic = ValueModel(double(tiny_model_folder).base_model, Critic(load_causal_lm(tiny_model_folder)).value_head)
    starts = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (actor, critic)]
    module = PPO(
        tiny_model_folder, actor_lr=LR, critic_lr=CRITIC_LR, adam_eps=EPS, gamma=0.9, lam=0.8, value_clip=0.01,
        loss_agg_mode=mode, loss_scale=14.0, clip_ratio_c=None, kl_reward_coef=kl_coef,
    )  # fmt: skip
    oracle_ppo(
        actor, critic, trajectories, mini_batches_of(experience), lr=LR, critic_lr=CRITIC_LR, eps=EPS, gamma=0.9,
        lam=0.8, value_clip=0.01, mode=mode, loss_scale=14.0, kl_coef=kl_coef,
        reference=double(tiny_model_folder) if kl_coef else None,
    )  # fmt: skip

    fit(module, [experience])

    assert_same(module.actor.network, actor, starts[0], 1e-6)
    # The head begins at 0.01: float32's rounding of its gradient is larger beside it.
    assert_same(module.critic, critic, starts[1], 1e-5)


class Optimizers(Callback):
    """Keeps which networks have moments after each iteration, and the norms that were stepped with."""

    def __init__(self):
        self.have_moments = []
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        norm = lambda net: sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None) ** 0.5  # noqa: E731
        self.norms.append((norm(module.actor), norm(module.critic)))

    def on_train_epoch_end(self, trainer, module):
        state = trainer.optimizers[0].state
        self.have_moments.append(tuple(any(p in state for p in n.parameters()) for n in (module.actor, module.critic)))


def test_warm_up_leaves_the_actor_and_its_moments_untouched(tiny_model_folder, make_trajectories, make_experience, fit):
    recorder, optimizers = IterationRecorder(), Optimizers()
    recorder.on_before_optimizer_step = lambda *_: None
    module = PPO(tiny_model_folder, actor_lr=LR, critic_lr=CRITIC_LR, critic_warmup_iterations=2)
    experiences = [make_experience(make_trajectories(seed=seed), num_mini_batches=2) for seed in range(3)]

    trainer = fit(module, experiences, callbacks=[recorder, optimizers])

    assert are_equal(recorder.start, recorder.weights[1])
    assert not are_equal(recorder.start, recorder.weights[2])
    assert optimizers.have_moments == [(False, True), (False, True), (True, True)]
    # The first two iterations do not count as steps that the replicas have not seen.
    assert module.steps_since_sync == 2
    assert trainer.global_step == 6


# O45, with a critic.
def test_iterations_of_actor_and_critic_count_once_and_are_clipped_apart(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    recorder, optimizers = IterationRecorder(), Optimizers()
    module = PPO(
        tiny_model_folder, actor_lr=4e-3, critic_lr=8e-3, lr_warmup_iterations=3, max_grad_norm=0.01,
        critic_max_grad_norm=0.02,
    )  # fmt: skip
    experiences = [make_experience(make_trajectories(seed=seed), num_mini_batches=2) for seed in range(3)]

    trainer = fit(module, experiences, callbacks=[recorder, optimizers])

    assert trainer.global_step == 6
    assert recorder.of("iteration") == [0, 1, 2]
    assert recorder.of("actor/lr") == pytest.approx([1e-3, 2e-3, 3e-3])
    assert recorder.of("critic/lr") == pytest.approx([2e-3, 4e-3, 6e-3])
    for actor_norm, critic_norm in optimizers.norms:
        assert actor_norm == pytest.approx(0.01, rel=1e-3)
        assert critic_norm == pytest.approx(0.02, rel=1e-3)
    assert min(recorder.of("critic/grad_norm")) > 0.02
    assert all(recorder.metrics[0][name] is not None for name in ("critic/vf_loss", "critic/vf_explained_var"))


def test_equal_rewards_still_teach_the_critic(tiny_model_folder, make_trajectories, make_experience, fit):
    module = PPO(tiny_model_folder, critic_lr=3e-3, value_clip=100.0)
    recorder = IterationRecorder()
    experiences = [make_experience(make_trajectories(seed=3, rewards=[1.0] * 20)) for _ in range(8)]

    fit(module, experiences, callbacks=[recorder])

    losses = recorder.of("critic/vf_loss")
    # At first the critic says about 0 and the return is 1: half the squared error is a half.
    assert losses[0] == pytest.approx(0.5, abs=0.02)
    assert losses[-1] < 0.1


def test_both_networks_learn_on_bf16_copies(tiny_model_folder, make_trajectories, make_experience, fit):
    recorder = IterationRecorder()
    module = PPO(tiny_model_folder, actor_lr=1e-3, critic_lr=1e-3)
    experience = make_experience(make_trajectories(), num_mini_batches=2)

    fit(module, [experience], precision="bf16-mixed", callbacks=[recorder])

    assert module.critic.working_copy is not None
    assert recorder.of("actor/first_ratio_deviation")[0] < 1e-3
    start = load_causal_lm(tiny_model_folder).base_model.state_dict()
    for name, parameter in module.critic.backbone.named_parameters():
        assert parameter.dtype == torch.float32
        assert not torch.equal(parameter, start[name]), name


def test_the_adapted_kl_coefficient_goes_on_after_a_resume(tiny_model_folder):
    first = PPO(tiny_model_folder, kl_reward_coef=0.1, kl_reward_target=0.05, kl_reward_horizon=100)
    first.kl_controller.update(kl=1.0, num_sequences=50)
    checkpoint: dict = {}
    first.on_save_checkpoint(checkpoint)
    adaptive = PPO(tiny_model_folder, kl_reward_coef=0.3, kl_reward_target=0.05)
    fixed = PPO(tiny_model_folder, kl_reward_coef=0.3)

    adaptive.on_load_checkpoint(checkpoint)
    fixed.on_load_checkpoint(checkpoint)

    assert adaptive.kl_controller.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 0.5))
    assert fixed.kl_controller.kl_coef == 0.3  # a fixed one is a setting, and the configuration wins


def test_options_out_of_range_name_the_option(tiny_model_folder):
    for options, message in [
        ({"lam": 1.5}, r"model\.lam=1\.5 must be at least 0 and at most 1"),
        ({"critic_lr": 0.0}, r"model\.critic_lr=0\.0 must be above 0"),
        ({"value_clip": -1.0}, r"model\.value_clip=-1\.0 must be above 0"),
        ({"critic_max_grad_norm": 0.0}, r"model\.critic_max_grad_norm=0\.0 must be above 0"),
        ({"rollout_correction": "tis"}, r"model\.rollout_correction='tis' must be one of off, token-tis"),
    ]:
        with pytest.raises(ValueError, match=message):
            PPO(tiny_model_folder, **options)


def test_vapo_has_a_lambda_of_its_own_for_the_critic_and_for_every_length():
    module = VAPO("unused", alpha=0.5, critic_lam=1.0, gamma=1.0)
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    values = torch.full((2, 4), 0.5)
    mask = torch.tensor([[True] * 4, [True, False, False, False]])

    advantages, returns = module.estimate(rewards, values, mask)

    # Four tokens: lambda 1 - 1 / 2, differences (0, 0, 0, 0.5). One token: lambda 0.
    torch.testing.assert_close(advantages, torch.tensor([[0.0625, 0.125, 0.25, 0.5], [0.5, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[1.0] * 4, [1.0, 0.0, 0.0, 0.0]]))


def test_vapo_adds_the_mean_likelihood_of_right_answers(tiny_model_folder, make_trajectories, make_experience, fit):
    """The same weights from one micro-batch and from many, and others than without the term."""
    gradients = []
    for max_tokens, nll_coef in ((1000, 0.5), (40, 0.5), (1000, 0.0)):
        recorder = IterationRecorder()
        experience = make_experience(make_trajectories(), max_tokens=max_tokens, share_prompts=False)
        module = VAPO(tiny_model_folder, actor_lr=LR, alpha=0.5, nll_coef=nll_coef, max_grad_norm=1e9)
        fit(module, [experience], callbacks=[recorder])
        gradients.append(recorder.gradients[0])

    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=2e-6, rtol=1e-4)
    assert any(not torch.allclose(gradients[2][name], gradient, atol=1e-3) for name, gradient in gradients[0].items())


def test_the_optimal_token_baseline_scores_squared_probabilities(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    trajectories = make_trajectories()
    experience = make_experience(trajectories, temperature=0.7, max_tokens=60)
    network = double(tiny_model_folder)

    fit(OptimalTokenBaseline(tiny_model_folder, actor_lr=LR), [experience])

    assert experience.columns["sum_pi_squared"][0].numel()
    for trajectory, squares in zip(experience.trajectories, experience.columns["sum_pi_squared"], strict=True):
        ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
        table = (network(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1] / 0.7).softmax(-1)
        sampled = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
        torch.testing.assert_close(squares[sampled].double(), table.square().sum(-1)[sampled], atol=1e-6, rtol=1e-4)


def test_pf_ppo_counts_a_trajectory_as_often_as_it_was_drawn(
    tiny_model_folder, make_trajectories, make_experience, fit
):
    experience = make_experience(make_trajectories(seed=6))
    module = PFPPO(tiny_model_folder, filtration="max-min", loss_agg_mode="token-sum")
    fit(module, [experience])
    extremes = (experience.rewards == experience.rewards.max()) | (experience.rewards == experience.rewards.min())
    assert int(module._counts.sum()) == 20
    assert not module._counts[~extremes].any()

    module._counts = torch.arange(20.0)
    batch = next(MiniBatch(experience, 0, 0, 0).micro_batches())[0]
    loss = module.aggregate(
        torch.ones_like(batch.loss_mask, dtype=torch.float32), batch, MiniBatch(experience, 0, 0, 0)
    )

    tokens = experience.loss_tokens[[experience.indices[position] for position in batch.positions]]
    drawn = [experience.indices[position] for position in batch.positions]
    assert loss.item() == sum(index * int(count) for index, count in zip(drawn, tokens, strict=True))
