from __future__ import annotations

import copy
import math
import random

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_rl.callbacks import IterationCheckpoint
from lit_rl.data import ConversationTokens, PromptCursor
from lit_rl.experience.conversations import ConversationLoader
from lit_rl.experience.progress import PhaseProgress
from lit_rl.models.lora import LoraSettings
from lit_rl.modules import SFT

VOCABULARY = 97


def make_rows(count: int = 7, seed: int = 0) -> list[ConversationTokens]:
    """Random conversations: uneven lengths, turns of the environment in between."""
    rng = random.Random(seed)
    rows = []
    for index in range(count):
        length = rng.randint(1, 15)
        mask = [0 if 3 < column < 7 and column < length - 1 else 1 for column in range(length)]
        prompt, response = ([rng.randrange(1, VOCABULARY) for _ in range(n)] for n in (rng.randint(1, 9), length))
        rows.append(ConversationTokens(row_id=str(index), prompt_ids=prompt, response_ids=response, loss_mask=mask))
    return rows


def padded_loss(network: torch.nn.Module, rows: list[ConversationTokens]) -> torch.Tensor:
    """Mean negative log-likelihood of the learned tokens by a plain padded forward."""
    longest = max(row.length for row in rows)
    ids = torch.tensor([row.prompt_ids + row.response_ids + [0] * (longest - row.length) for row in rows])
    mask = torch.tensor(
        [[0] * len(row.prompt_ids) + row.loss_mask + [0] * (longest - row.length) for row in rows]
    ).bool()
    attention = torch.tensor([[1] * row.length + [0] * (longest - row.length) for row in rows])
    logits = network(input_ids=ids, attention_mask=attention).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1][mask[:, 1:]], ids[:, 1:][mask[:, 1:]])


class Watch(L.Callback):
    """Keeps gradients before the first step, losses and learning rates."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.rates: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])
        if not self.gradients:
            named = pl_module.actor.network.named_parameters()
            self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Data(L.LightningDataModule):
    """A cursor over given rows."""

    def __init__(self, rows, *, batch_size=7, num_steps=None, max_tokens=30, val_rows=()) -> None:
        super().__init__()
        self.rows, self.val_rows = rows, val_rows
        self.cursor = PromptCursor.for_source(rows, seed=1)
        self.options = {"batch_size": batch_size, "max_tokens": max_tokens, "phase": PhaseProgress()}
        self.num_steps = num_steps

    def train_dataloader(self):
        return ConversationLoader(self.rows, self.cursor, num_steps=self.num_steps, **self.options)

    def val_dataloader(self):
        return ConversationLoader(self.val_rows, None, num_steps=None, **self.options) if self.val_rows else []

    def state_dict(self):
        return self.cursor.state_dict()

    def load_state_dict(self, state_dict) -> None:
        self.cursor.load_state_dict(state_dict)


def run(module: SFT, data: Data, iterations: int = 1, *, callbacks=(), ckpt_path=None, **options) -> Watch:
    torch.manual_seed(0)
    watch = Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=iterations, logger=False, num_sanity_val_steps=0,
        enable_checkpointing=any(isinstance(item, IterationCheckpoint) for item in callbacks),
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch, *callbacks], **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return watch


@pytest.mark.parametrize(("max_tokens", "attention"), [(30, "sdpa"), (64, "sdpa"), (1000, "sdpa"), (64, "eager")])
def test_loss_and_gradients_are_those_of_a_padded_float64_forward(tiny_model_folder, max_tokens, attention) -> None:
    rows = make_rows()
    exact = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64, attn_implementation="eager")
    expected = padded_loss(exact, rows)
    expected.backward()

    module = SFT(tiny_model_folder, max_grad_norm=1e9, attn_implementation=attention)
    watch = run(module, Data(rows, max_tokens=max_tokens))

    assert watch.logged[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-6)
    for name, parameter in exact.named_parameters():
        torch.testing.assert_close(watch.gradients[name].double(), parameter.grad, rtol=1e-5, atol=1e-6)


def test_validation_measures_loss_and_first_choices_over_all_tokens(tiny_model_folder) -> None:
    rows, held_out = make_rows(4), make_rows(9)  # the first four are the same
    module = SFT(tiny_model_folder, actor_lr=1e-2)

    watch = run(module, Data(rows, val_rows=held_out), 15)

    network = module.actor.network.double()
    network.set_attn_implementation("eager")
    hits = tokens = 0
    for row in held_out:
        logits = network(input_ids=torch.tensor([row.prompt_ids + row.response_ids])).logits[0]
        for column, (token, mask) in enumerate(zip(row.response_ids, row.loss_mask, strict=True)):
            hits += mask * int(logits[len(row.prompt_ids) + column - 1].argmax() == token)
            tokens += mask
    assert watch.logged[-1]["val/loss"] == pytest.approx(padded_loss(network, held_out).item(), rel=1e-5)
    assert watch.logged[-1]["val/token_accuracy"] == pytest.approx(hits / tokens)
    assert 0 < hits < tokens


def test_a_resumed_run_equals_the_uninterrupted_one(tiny_model_folder, tmp_path) -> None:
    def data() -> Data:
        return Data(make_rows(), batch_size=3, num_steps=2)

    options = {"actor_lr": 1e-2, "lr_schedule": "cosine", "lr_warmup_steps": 2}
    whole = SFT(tiny_model_folder, **options)
    seen = run(whole, data(), 4, callbacks=[IterationCheckpoint(dirpath=str(tmp_path), keep=-1)])

    resumed = SFT(tiny_model_folder, **options)
    rest = run(resumed, data(), 4, ckpt_path=str(tmp_path / "iteration_00001.ckpt"))

    assert rest.rates == seen.rates[4:]
    assert [row["train/loss"] for row in rest.logged] == [row["train/loss"] for row in seen.logged[2:]]
    for name, parameter in whole.actor.named_parameters():
        assert torch.equal(parameter, resumed.actor.get_parameter(name)), name
    assert resumed.policy_version == 4


def test_with_lora_a_checkpoint_holds_the_adapters_alone_and_resumes(tiny_model_folder, tmp_path) -> None:
    def data() -> Data:
        return Data(make_rows(), batch_size=3, num_steps=2)

    options = {"actor_lr": 1e-2, "lora": LoraSettings(r=2)}
    whole = SFT(tiny_model_folder, **options)
    seen = run(whole, data(), 4, callbacks=[IterationCheckpoint(dirpath=str(tmp_path), keep=-1)])
    assert seen.logged[-1]["train/loss"] < seen.logged[0]["train/loss"] - 0.1

    saved = torch.load(tmp_path / "iteration_00001.ckpt", weights_only=True)
    assert all(".lora_A." in name or ".lora_B." in name for name in saved["state_dict"])
    assert len(saved["state_dict"]) == 2 * 7 * 2
    assert saved["lit_rl_model"] == {"model_name": tiny_model_folder, "lora": whole.lora.as_dict()}
    resumed = SFT(tiny_model_folder, **options)
    rest = run(resumed, data(), 4, ckpt_path=str(tmp_path / "iteration_00001.ckpt"))

    assert [row["train/loss"] for row in rest.logged] == [row["train/loss"] for row in seen.logged[2:]]
    for name, parameter in whole.actor.named_parameters():
        assert torch.equal(parameter, resumed.actor.get_parameter(name)), name
    with pytest.raises(ValueError, match=r"The checkpoint lacks \d+ of the \d+ weights"):
        run(SFT(tiny_model_folder), data(), 4, ckpt_path=str(tmp_path / "iteration_00001.ckpt"))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 0.7, 0.4, 0.1]),
        ("cosine", [1 / 3, 2 / 3, 1] + [0.1 + 0.45 * (1 + math.cos(math.pi * share)) for share in (1 / 3, 2 / 3, 1)]),
    ],
)
def test_the_learning_rate_follows_its_schedule_step_by_step(tiny_model_folder, schedule, expected) -> None:
    module = SFT(tiny_model_folder, actor_lr=1e-3, lr_schedule=schedule, lr_warmup_steps=2, min_lr_share=0.1)

    watch = run(module, Data(make_rows(), batch_size=2, num_steps=3), 2)

    assert watch.rates == pytest.approx([1e-3 * share for share in expected])


def test_it_learns_by_heart_and_early_stopping_ends_it(tiny_model_folder) -> None:
    rows = make_rows(4)
    data = Data(rows, batch_size=2, val_rows=copy.deepcopy(rows))
    stop = L.pytorch.callbacks.EarlyStopping("val/token_accuracy", mode="max", stopping_threshold=0.9, patience=99)

    watch = run(SFT(tiny_model_folder, actor_lr=1e-2), data, 200, callbacks=[stop])

    assert watch.logged[-1]["val/token_accuracy"] >= 0.9
    assert watch.logged[-2]["val/token_accuracy"] < 0.9
    assert len(watch.logged) < 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_schedule": "step"}, r"model\.lr_schedule='step' must be one of constant, linear, cosine"),
        ({"min_lr_share": 1.5}, r"model\.min_lr_share=1\.5 must be at least 0 and at most 1"),
        ({"lr_warmup_steps": -1}, r"model\.lr_warmup_steps=-1 must be at least 0"),
        ({"max_grad_norm": 0.0}, r"model\.max_grad_norm=0\.0 must be above 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SFT("bundled/tiny-random", **options)


def test_a_schedule_without_an_end_is_refused(tiny_model_folder) -> None:
    with pytest.raises(ValueError, match=r"model\.lr_schedule='linear' ends with the last iteration: set trainer"):
        run(SFT(tiny_model_folder, lr_schedule="linear"), Data(make_rows()), iterations=-1)
