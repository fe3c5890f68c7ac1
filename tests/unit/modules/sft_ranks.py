"""What a rank does in the tests of supervised fine-tuning on several ranks."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from rank_updates import full

from lit_rl.data import ConversationTokens, PromptCursor
from lit_rl.experience.conversations import ConversationLoader
from lit_rl.experience.progress import PhaseProgress
from lit_rl.modules import SFT
from lit_rl.weight_sync.source import stream_weights


class Data(L.LightningDataModule):
    """Given rows, dealt as SFTDataModule deals them."""

    def __init__(self, rows: list[ConversationTokens], val_rows: list[ConversationTokens]) -> None:
        super().__init__()
        self.rows, self.val_rows = rows, val_rows

    def loader(self, rows: list[ConversationTokens], cursor: PromptCursor | None) -> ConversationLoader:
        return ConversationLoader(
            rows, cursor, batch_size=4, num_steps=None, max_tokens=40, phase=PhaseProgress(),
            world_size=self.trainer.world_size, rank=self.trainer.global_rank,
        )  # fmt: skip

    def train_dataloader(self) -> ConversationLoader:
        return self.loader(self.rows, PromptCursor.for_source(self.rows, seed=1))

    def val_dataloader(self) -> ConversationLoader:
        return self.loader(self.val_rows, None)


class Watch(L.Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if not self.gradients:
            named = module.actor.network.named_parameters()
            self.gradients = {name: full(p.grad) for name, p in named if p.grad is not None}


def fit(
    options: dict[str, Any], rows: list[ConversationTokens], val_rows: list[ConversationTokens], strategy: Any = "auto"
) -> dict[str, Any]:
    """Two iterations on this rank."""
    module, watch = SFT(**options), Watch()
    trainer = L.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), max_epochs=2, logger=False,
        strategy=strategy() if callable(strategy) else strategy, enable_checkpointing=False, num_sanity_val_steps=0,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(module, datamodule=Data(rows, val_rows))
    weights = {
        name: tensor.clone()
        for bucket in stream_weights(module.actor.network, 1 << 12, torch.float32)
        for name, tensor in bucket
    }
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"gradients": watch.gradients, "weights": weights, "metrics": metrics}
