"""On-policy distillation against plain float64 arithmetic, its options, and that it moves the policy to the teacher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from known_teacher import KnownTeacher, response_table
from lightning.pytorch.callbacks import Callback
from transformers import AutoModelForCausalLM

from lit_rl.modules import GRPO, OnPolicyDistillation
from lit_rl.types import SamplingParams

TEACHER = {"t": {"model_name": "unused"}}


def double(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def teacher_network(folder: str) -> Any:
    """The student's architecture with other weights."""
    network = double(folder)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return network


class Gradients(Callback):
    """Keeps the gradient of the first optimizer step."""

    def __init__(self) -> None:
        self.of: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        named = module.actor.network.named_parameters()
        self.of = self.of or {name: parameter.grad.clone() for name, parameter in named}


def make_module(folder: str, teacher: Any, loss: str, **options: Any) -> OnPolicyDistillation:
    module = OnPolicyDistillation(folder, TEACHER, distillation_loss=loss, max_grad_norm=1e9, **options)
    module.teacher_scores = KnownTeacher(teacher, options.get("top_k", 32))
    return module


def plain_token_loss(student: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor, loss: str) -> torch.Tensor:
    """``[T]`` from ``[T, V]`` log-probs: the formulas as papers write them."""
    log_s, log_t = (table.gather(-1, ids[:, None])[:, 0] for table in (student, teacher))
    gap = log_s - log_t
    if loss == "forward-kl":
        best = teacher.topk(5)
        p_t, p_s = best.values.exp(), student.gather(-1, best.indices).exp()
        rest_t, rest_s = 1 - p_t.sum(-1), 1 - p_s.sum(-1)
        return (p_t * (p_t / p_s).log()).sum(-1) + rest_t * (rest_t / rest_s).log()
    return {
        # On-policy the ratio is 1: its gradient is that of the log-prob, times the advantage -gap.
        "advantage": gap.detach() * (log_s - log_s.detach()).exp(),
        "k1+": gap.square() / 2,  # has this gradient
        "k2": gap.square() / 2,
        "k3": (-gap).exp() - 1 + gap,
        "abs": gap.abs(),
    }[loss]


@pytest.mark.parametrize("loss", ["advantage", "k1+", "k2", "k3", "abs", "forward-kl"])
def test_the_gradient_equals_the_plain_one_in_float64(
    tiny_model_folder: str, make_trajectories: Any, make_experience: Any, fit: Any, loss: str
) -> None:
    trajectories = make_trajectories(seed=2)
    student, teacher = double(tiny_model_folder), teacher_network(tiny_model_folder)
    gradients = Gradients()
    module = make_module(
        tiny_model_folder, teacher, loss, distillation_coef=0.7, top_k=5, clip_ratio_c=None, clip_ratio_high=1e6
    )

    fit(module, [make_experience(trajectories, max_tokens=48)], callbacks=[gradients])

    total, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for trajectory in trajectories:
        mask, ids = torch.tensor(trajectory.loss_mask), torch.tensor(trajectory.response_ids, dtype=torch.int64)
        if mask.sum() == 0:
            continue
        tables = (response_table(network, trajectory) for network in (student, teacher))
        student_table, teacher_table = tables
        total = total + (plain_token_loss(student_table, teacher_table.detach(), ids, loss) * mask).sum()
        num_tokens += int(mask.sum())
    (0.7 * total / num_tokens).backward()
    for name, parameter in student.named_parameters():
        got = gradients.of[name].double()
        assert (got - parameter.grad).norm() <= 2e-5 * parameter.grad.norm() + 1e-9, name


def test_beside_a_reward_the_advantages_add_up(
    tiny_model_folder: str, make_trajectories: Any, make_experience: Any, fit: Any
) -> None:
    teacher = teacher_network(tiny_model_folder)
    experiences = [make_experience(make_trajectories(seed=4)) for _ in range(3)]
    fit(GRPO(tiny_model_folder), [experiences[0]])
    fit(make_module(tiny_model_folder, teacher, "advantage", distillation_coef=0.5), [experiences[1]])

    fit(make_module(tiny_model_folder, teacher, "advantage", distillation_coef=0.5, reward_coef=2.0), [experiences[2]])

    of_reward, of_teacher, both = (experience.advantages for experience in experiences)
    mask = experiences[2].loss_mask(range(len(experiences[2])))
    torch.testing.assert_close(both, torch.where(mask, 2 * of_reward[:, None] + of_teacher, 0.0))
    assert of_teacher[mask].abs().min() > 0
    assert both[~mask].abs().max() == 0


def test_the_bound_holds_for_every_token(
    tiny_model_folder: str, make_trajectories: Any, make_experience: Any, fit: Any
) -> None:
    experience = make_experience(make_trajectories(seed=4))

    fit(make_module(tiny_model_folder, teacher_network(tiny_model_folder), "advantage", max_gap=0.25), [experience])

    assert experience.advantages.abs().max() == 0.25


# On given samples forward KL alone goes down: reverse KL is estimated from the policy's own (see the integration test).
def test_forward_kl_moves_the_policy_to_the_teacher(
    tiny_model_folder: str, make_trajectories: Any, make_experience: Any, fit: Any
) -> None:
    trajectories = make_trajectories(seed=5, with_tools=False)
    teacher = teacher_network(tiny_model_folder)
    module = make_module(tiny_model_folder, teacher, "forward-kl", top_k=32, actor_lr=1e-2)

    def divergence(network: Any) -> float:
        with torch.no_grad():
            pairs = [(response_table(network, t), response_table(teacher, t)) for t in trajectories if t.response_ids]
            kl = torch.cat([(p.double().exp() * (p.double() - s.double())).sum(-1) for s, p in pairs])
        return kl.mean().item()

    before = divergence(double(tiny_model_folder))
    fit(module, [make_experience(trajectories, iteration=i) for i in range(15)])

    assert divergence(module.actor.network) < 0.7 * before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"distillation_loss": "k1"}, r"model.distillation_loss='k1' must be one of advantage, k1\+"),
        ({"distillation_coef": -1.0}, "model.distillation_coef=-1.0 must be at least 0"),
        ({"reward_coef": float("nan")}, "model.reward_coef=nan"),
        ({"top_k": 0}, "model.top_k=0 must be at least 1"),
        ({"tail": "drop"}, "model.tail='drop' must be one of"),
        ({"max_gap": 0.0}, "model.max_gap=0.0 must be above 0"),
        ({"teachers": {}}, "model.teachers is empty"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OnPolicyDistillation(**{"model_name": "unused", "teachers": TEACHER, **options})


def test_a_temperature_other_than_1_is_refused() -> None:
    module = OnPolicyDistillation("unused", TEACHER)

    with pytest.raises(ValueError, match=r"data.sampling.temperature=0.7: teachers score at temperature 1"):
        module.check_data(SimpleNamespace(sampling=SamplingParams(temperature=0.7)))


def test_a_fit_without_a_datamodule_is_refused(
    tiny_model_folder: str, make_trajectories: Any, make_experience: Any, fit: Any
) -> None:
    with pytest.raises(ValueError, match="fit with a RolloutDataModule"):
        fit(OnPolicyDistillation(tiny_model_folder, TEACHER), [make_experience(make_trajectories())])


def test_a_group_of_one_is_enough_unless_rewards_count() -> None:
    assert OnPolicyDistillation("unused", TEACHER).min_group_size == 1
    assert OnPolicyDistillation("unused", TEACHER, reward_coef=1.0).min_group_size == 2
