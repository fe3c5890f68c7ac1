"""Supervised fine-tuning on one rank and on several: the same gradients, weights and numbers."""

from __future__ import annotations

import functools

import pytest
import torch
from ranks import run_on_ranks
from sft_ranks import fit
from test_sft import make_rows

from lit_rl.models.lora import LoraSettings
from lit_rl.strategies import DeepSpeedStrategy, FSDP2Strategy

ROWS, HELD_OUT = make_rows(7), make_rows(5, seed=5)
NUMBERS = ("train/loss", "train/grad_norm", "train/num_tokens", "val/loss", "val/token_accuracy")


@pytest.mark.parametrize(
    "strategy",
    ["ddp", FSDP2Strategy, functools.partial(DeepSpeedStrategy, stage=2)],
    ids=["ddp", "fsdp2", "zero-2"],
)
@pytest.mark.parametrize("lora", [None, LoraSettings(r=2)], ids=["all weights", "lora"])
def test_two_ranks_do_what_one_does(tiny_model_folder, strategy, lora) -> None:
    # An epsilon large enough that AdamW does not blow up rounding differences of tiny gradients.
    options = {"model_name": tiny_model_folder, "actor_lr": 1e-3, "adam_eps": 1e-3, "lora": lora}
    alone = fit(options, ROWS, HELD_OUT)

    for rank in run_on_ranks(fit, 2, options, ROWS, HELD_OUT, strategy):
        if not isinstance(strategy, functools.partial):  # DeepSpeed keeps its gradients to itself
            assert rank["gradients"].keys() == alone["gradients"].keys()
        for name, gradient in alone["gradients"].items() if rank["gradients"] else ():
            error = float((rank["gradients"][name] - gradient).norm() / gradient.norm().clamp_min(1e-3))
            assert error < 1e-5, name
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-5, atol=1e-6, msg=name)
        for name in NUMBERS:
            assert rank["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5), name
