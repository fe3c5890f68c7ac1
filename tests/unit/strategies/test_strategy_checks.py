"""What is refused before anything starts: strategies that would train wrongly, and checkpoints of other strategies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.models import Actor, Critic
from lit_rl.strategies import DeepSpeedStrategy, FSDP2Strategy, check_checkpoint, check_strategy
from lit_rl.strategies.fsdp2 import decoder_layers


@pytest.fixture
def checkpoints(tmp_path: Path) -> dict[str, Path]:
    """What each strategy leaves, as far as it tells them apart."""
    paths = {name: tmp_path / f"{name}.ckpt" for name in ("file", "fsdp2", "deepspeed")}
    paths["file"].touch()
    (paths["fsdp2"]).mkdir()
    (paths["fsdp2"] / ".metadata").touch()
    (paths["fsdp2"] / "meta.pt").touch()
    (paths["deepspeed"] / "checkpoint").mkdir(parents=True)
    (paths["deepspeed"] / "latest").write_text("checkpoint")
    for rank in range(2):
        (paths["deepspeed"] / f"checkpoint/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").touch()
    return paths


def make(name: str) -> Any:
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
        return DeepSpeedStrategy()
    return {"one": SingleDeviceStrategy(), "ddp": DDPStrategy(), "fsdp2": FSDP2Strategy()}[name]


@pytest.mark.parametrize(
    ("strategy", "checkpoint"),
    [("one", "file"), ("ddp", "file"), ("fsdp2", "file"), ("fsdp2", "fsdp2"), ("deepspeed", "deepspeed")],
)
def test_a_strategy_takes_its_own_checkpoints(checkpoints: dict[str, Path], strategy: str, checkpoint: str) -> None:
    check_checkpoint(checkpoints[checkpoint], make(strategy), 2)


@pytest.mark.parametrize(
    ("strategy", "checkpoint", "names"),
    [
        ("ddp", "fsdp2", ("DDPStrategy", "FSDP2Strategy")),
        ("ddp", "deepspeed", ("DDPStrategy", "DeepSpeedStrategy")),
        ("one", "fsdp2", ("SingleDeviceStrategy", "FSDP2Strategy")),
        ("fsdp2", "deepspeed", ("FSDP2Strategy", "DeepSpeedStrategy")),
        ("deepspeed", "file", ("DeepSpeedStrategy", "one device or DDP")),
        ("deepspeed", "fsdp2", ("DeepSpeedStrategy", "FSDP2Strategy")),
    ],
)
def test_a_checkpoint_of_another_strategy_is_refused_by_both_names(
    checkpoints: dict[str, Path], strategy: str, checkpoint: str, names: tuple[str, str]
) -> None:
    with pytest.raises(ValueError, match=r"was written by .* but trainer\.strategy is") as refused:
        check_checkpoint(checkpoints[checkpoint], make(strategy), 2)
    for name in names:
        assert name in str(refused.value)


def test_deepspeed_says_how_many_ranks_a_checkpoint_is_for(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="was written by 2 ranks.*this run has 4.*Set trainer.devices"):
        check_checkpoint(checkpoints["deepspeed"], make("deepspeed"), 4)


def test_zero_3_says_that_it_does_not_evaluate_a_checkpoint(checkpoints: dict[str, Path]) -> None:
    pytest.importorskip("deepspeed")
    check_checkpoint(checkpoints["deepspeed"], DeepSpeedStrategy(stage=3), 2)
    check_checkpoint(checkpoints["deepspeed"], DeepSpeedStrategy(stage=2), 2, is_training=False)
    with pytest.raises(ValueError, match="loads a ZeRO-3 checkpoint for fit only"):
        check_checkpoint(checkpoints["deepspeed"], DeepSpeedStrategy(stage=3), 2, is_training=False)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (ModelParallelStrategy(), "trainer.strategy=ModelParallelStrategy is not supported. Use auto"),
        (FSDPStrategy(), "trainer.strategy=FSDPStrategy is not supported"),
        (DDPStrategy(start_method="fork"), "'fork', and a forked or spawned rank cannot share Ray"),
    ],
)
def test_strategies_that_cannot_work_are_refused(strategy: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_strategy(strategy, "ray")


def test_several_machines_need_a_cluster_that_spans_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="num_nodes=2.*set RAY_ADDRESS"):
        check_strategy(DDPStrategy(), "ray", num_nodes=2)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_strategy(DDPStrategy(), "ray", num_nodes=2)


def test_what_is_sharded_layer_by_layer_is_what_transformers_keeps_together() -> None:
    config = LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    for network in (Actor(LlamaForCausalLM(config)), Critic(LlamaForCausalLM(config))):
        layers = decoder_layers(network)
        assert [type(layer).__name__ for layer in layers] == ["LlamaDecoderLayer"] * 3
    with pytest.raises(ValueError, match="Linear names no layers that belong together"):
        decoder_layers(nn.Linear(2, 2))
