"""A warm-up before RL: demonstrations are learned, rollouts say when to stop, and RL goes on from its checkpoint."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from tiny_fit import MODEL, MemoryLogger, tiny_data, tiny_fit

from lit_rl import GRPO, SFT, SFTDataModule, WarmupDataModule
from lit_rl.agents import AgentSettings
from lit_rl.callbacks import IterationCheckpoint, WeightSync
from lit_rl.data import Arithmetic, Conversation
from lit_rl.rewards import RewardSettings
from lit_rl.serving import ServingSettings

pytestmark = pytest.mark.usefixtures("nothing_left")


def says_yes(solution_str: str, ground_truth: str) -> dict[str, float]:
    return {"score": float("Yes" in solution_str), "format": float(solution_str.startswith("Yes"))}


def demonstrations(rows: Arithmetic) -> list[Conversation]:
    """Every question answered with the same word, which a random model can learn."""
    answer = {"role": "assistant", "content": "Yes"}
    prompts = [rows[index] for index in range(len(rows))]
    return [Conversation(row_id=prompt.row_id, messages=[*prompt.messages, answer]) for prompt in prompts]


def warmup_data(**changes) -> WarmupDataModule:
    settings = {
        "train_data": demonstrations(Arithmetic(split="train", num_rows=12, max_operand=9)),
        "val_data": Arithmetic(split="val", num_rows=3, max_operand=9),
        "batch_size": 4,
        "steps_per_iteration": 1,
        "max_conversation_tokens": 128,
        "max_prompt_tokens": 64,
        "max_response_tokens": 4,
        "max_tokens_per_micro_batch": 256,
        "agents": AgentSettings(num_workers=1),
        "rewards": RewardSettings(function=says_yes, num_workers=1),
        "serving": ServingSettings(replica="transformers", dtype="float32", max_num_seqs=1),
        "backend": "inline",
    }
    return WarmupDataModule(MODEL, **(settings | changes))


def trainer_of(logger: MemoryLogger, *callbacks: L.Callback, max_epochs: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu", devices=1, precision="32-true", max_epochs=max_epochs, num_sanity_val_steps=0, logger=logger,
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, IterationCheckpoint) for callback in callbacks),
    )  # fmt: skip


def test_a_warm_up_stops_on_what_its_rollouts_show_and_rl_goes_on_from_it(tmp_path) -> None:
    logger = MemoryLogger()
    stop = EarlyStopping("val-aux/arithmetic/format/mean", mode="max", stopping_threshold=0.5, patience=1000)
    save = IterationCheckpoint(dirpath=str(tmp_path))
    module = SFT(MODEL, actor_lr=5e-4)

    trainer_of(logger, WeightSync(), stop, save, max_epochs=40).fit(module, datamodule=warmup_data())

    shares = [share for _, share in logger.column("val-aux/arithmetic/format/mean")]
    assert shares[-1] >= 0.5
    assert all(share < 0.5 for share in shares[:-1])
    assert 2 <= len(shares) < 40

    # Its weights are those that RL starts from; optimizer and counters start anew.
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    rl = tiny_fit(1, module=GRPO(MODEL, actor_lr=1e-9), data=tiny_data(says_yes), check_val_every_n_epoch=1)
    rl.module.configure_model()
    rl.module.load_state_dict(checkpoint["state_dict"], strict=False)
    rl.fit()
    assert rl.logger.column("val-aux/arithmetic/format/mean") == [(1, shares[-1])]


def test_module_and_data_that_do_not_go_together_are_refused_before_anything_starts() -> None:
    rows = demonstrations(Arithmetic(split="train", num_rows=4, max_operand=9))

    with pytest.raises(ValueError, match=r"SFT learns from a ConversationBatch, RolloutDataModule serves a MiniBatch"):
        trainer_of(MemoryLogger(), WeightSync(), max_epochs=1).fit(SFT(MODEL), datamodule=tiny_data())
    with pytest.raises(ValueError, match=r"GRPO learns from a MiniBatch, SFTDataModule serves a ConversationBatch"):
        trainer_of(MemoryLogger(), max_epochs=1).fit(GRPO(MODEL), datamodule=SFTDataModule(MODEL, rows))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"data\.batch_size=0 must be at least 1"),
        ({"steps_per_iteration": 0}, r"data\.steps_per_iteration=0 must be at least 1"),
        ({"max_conversation_tokens": 9000}, r"data\.max_conversation_tokens=9000 is above data\.max_tokens_per_micro"),
    ],
)
def test_options_out_of_range_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SFTDataModule(MODEL, [], **options)
    with pytest.raises(ValueError, match=message):
        warmup_data(**options)


def test_conversations_longer_than_the_model_are_refused() -> None:
    rows = demonstrations(Arithmetic(split="train", num_rows=4, max_operand=9))
    data = SFTDataModule(MODEL, rows, max_conversation_tokens=9000, max_tokens_per_micro_batch=9000)

    with pytest.raises(
        ValueError, match=r"max_conversation_tokens=9000 is more than the 8192 positions of bundled/tiny"
    ):
        data.setup("fit")
