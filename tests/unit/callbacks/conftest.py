"""A real Trainer over a module of two weights, so that callbacks are tested in the order Lightning calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import lightning as L
import pytest
import torch

from lit_rl.experience.progress import PhaseProgress
from lit_rl.types import Prompt, Trajectory


class TinyModule(L.LightningModule):
    """Two mini-batches per iteration; ``scores`` gives the validation reward by iteration."""

    def __init__(self, scores: list[float] | None = None, learns: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scores = scores or [0.5] * 100
        self.learns = learns
        self.policy_version = 0
        self.weight = torch.nn.Linear(2, 1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.weight(batch).sum())
        if self.learns:
            optimizer.step()
        if self.trainer.is_last_batch:
            self.policy_version += 1
        values = {"critic/score/mean": self.current_epoch / 4, "response_length/mean": 8.0, "timing_s/gen": 1.25}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def on_load_checkpoint(self, checkpoint) -> None:
        self.policy_version = checkpoint["epoch"] + 1

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        values = {"val-core/sums/reward/mean@1": self.scores[self.current_epoch]}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)


class MiniBatches:
    """Sized and lazy, as the real loader; Lightning would take a list for several loaders."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.ones(1, 2), torch.ones(1, 2))


class TinyData(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.phase = PhaseProgress()
        self.sources: dict[str, list[Prompt] | None] = {"train": [], "val": [], "test": None}
        self.last_trajectories: list[Trajectory] = []
        self.last_validation_trajectories: list[Trajectory] = []

    def train_dataloader(self):
        return MiniBatches()

    def val_dataloader(self):
        return [torch.ones(1, 2)]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture
def train(tmp_path) -> Callable[..., L.Trainer]:
    """Run iterations with callbacks in ``tmp_path``."""

    def run(
        *callbacks: L.Callback,
        iterations: int = 3,
        validate_every: int = 1,
        module: L.LightningModule | None = None,
        data: L.LightningDataModule | None = None,
        ckpt_path: str | None = None,
        **options,
    ) -> L.Trainer:
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=iterations,
            check_val_every_n_epoch=validate_every,
            default_root_dir=tmp_path,
            logger=options.pop("logger", False),
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=options.pop("num_sanity_val_steps", 0),
            enable_checkpointing=any(isinstance(c, L.pytorch.callbacks.Checkpoint) for c in callbacks),
            callbacks=list(callbacks),
            log_every_n_steps=1,
            **options,
        )
        trainer.fit(module or TinyModule(), data or TinyData(), ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def make_module():
    return TinyModule


@pytest.fixture
def make_data():
    return TinyData


@pytest.fixture
def make_trajectory():
    def make(row_id: str = "row1", sample: int = 0, **changes) -> Trajectory:
        values: dict = {
            "row_id": row_id,
            "group_id": f"0:{row_id}",
            "sample_index": sample,
            "data_source": "sums",
            "prompt_ids": [1, 2, 3],
            "response_ids": [4, 5],
            "loss_mask": [1, 1],
            "rollout_logprobs": [-0.5, -0.25],
            "policy_versions": [3, 4],
            "reward": 1.0,
            "reward_parts": {"format": 0.5},
            "text": "four five",
        }
        return Trajectory(**(values | changes))

    return make
