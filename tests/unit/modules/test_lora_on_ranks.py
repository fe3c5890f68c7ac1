"""RL with adapters on one rank and on several: the same weights and numbers, the reference included."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from rank_updates import Case, rollout_of, update
from ranks import run_on_ranks
from transformers import AutoModelForCausalLM

from lit_rl.experience.share import PlanSettings
from lit_rl.export_command import export
from lit_rl.models import load_tokenizer
from lit_rl.models.lora import LoraSettings
from lit_rl.strategies import DeepSpeedStrategy, FSDP2Strategy


@pytest.mark.parametrize(
    "strategy",
    ["ddp", FSDP2Strategy, functools.partial(DeepSpeedStrategy, stage=2)],
    ids=["ddp", "fsdp2", "zero-2"],
)
def test_two_ranks_do_what_one_does(tiny_model_folder, make_trajectories, strategy) -> None:
    options = {"actor_lr": 1e-2, "adam_eps": 1e-3, "kl_loss_coef": 0.3, "lora": LoraSettings(r=2), "max_grad_norm": 1e9}
    case = Case(
        module="GRPO", options={"model_name": tiny_model_folder, **options}, settings=PlanSettings(max_tokens=40),
        rollouts=[rollout_of(make_trajectories(seed=seed), seed) for seed in range(2)],
    )  # fmt: skip
    (alone,) = update([case])
    assert alone.metrics[0]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert alone.metrics[1]["actor/kl_loss"] > 1e-6

    for (rank,) in run_on_ranks(update, 2, [case], strategy):
        for name, weight in alone.weights.items():
            torch.testing.assert_close(rank.weights[name], weight, rtol=1e-5, atol=1e-5, msg=name)
        for name in ("actor/kl_loss", "actor/pg_loss", "actor/grad_norm"):
            assert rank.metrics[1][name] == pytest.approx(alone.metrics[1][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("lora", [None, LoraSettings(r=2)], ids=["all weights", "lora"])
def test_a_sharded_checkpoint_is_exported_whole(tiny_model_folder, make_trajectories, tmp_path, lora) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model_folder, model)
    load_tokenizer("bundled/tiny-random").save_pretrained(model)
    case = Case(
        module="GRPO", options={"model_name": str(model), "actor_lr": 1e-2, "lora": lora}, save_in=str(tmp_path),
        settings=PlanSettings(max_tokens=40), rollouts=[rollout_of(make_trajectories())],
    )  # fmt: skip
    ((trained,), _) = run_on_ranks(update, 2, [case], FSDP2Strategy)

    out = export(tmp_path / "iteration_00000.ckpt", tmp_path / "exported", dtype="float32")

    exported = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert {f"actor.{name}" for name in exported} == trained.weights.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight.detach(), trained.weights[f"actor.{name}"], msg=name)
