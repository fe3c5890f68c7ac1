"""Real Lightning classes, as small as they can be, in the shape the command line expects."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

import lightning as L
import torch

from lit_rl.cli import RLCLI
from lit_rl.experience.progress import PhaseProgress
from lit_rl.modules.option_ranges import check_number
from lit_rl.types import Trajectory


@dataclass(kw_only=True)
class Sampling:
    temperature: float = 1.0
    stop: list[str] = field(default_factory=list)


class BaseModule(L.LightningModule):
    def __init__(self, model_name: str | None = None, lr: float = 0.1, fails_at: int = -1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_name = model_name
        self.lr = lr
        self.fails_at = fails_at
        self.weight = torch.nn.Linear(2, 1)
        self.seen: list[int] = []
        self.policy_version = 0

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.current_epoch == self.fails_at:
            self.fail()
        if self.trainer.is_last_batch:
            self.policy_version += 1
        self.seen.append(int(batch[0, 0]))
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.weight(batch).sum())
        optimizer.step()
        reward = float(self.current_epoch) / 10
        values = {
            "iteration": float(self.current_epoch),
            "step": float(self.current_epoch),
            "critic/score/mean": reward,
        }
        values |= {"response_length/mean": 7.0, "timing_s/gen": 1.5, "timing_s/update_actor": 2.5}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def on_save_checkpoint(self, checkpoint) -> None:
        checkpoint["lit_rl_policy_version"] = self.policy_version

    def fail(self) -> None:
        raise RuntimeError("the step failed")

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        values = {"val-core/sums/reward/mean@1": self.current_epoch / 5, "step": float(self.current_epoch + 1)}
        self.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        pass


class ModuleA(BaseModule):
    def __init__(
        self,
        model_name: str | None = None,
        lr: float = 0.1,
        fails_at: int = -1,
        hidden: int = 4,
        use_bias: bool = False,
        betas: tuple[float, float] = (0.9, 0.99),
        limits: list[int] | None = None,
    ) -> None:
        super().__init__(model_name, lr, fails_at)
        self.hidden = hidden
        self.use_bias = use_bias
        self.betas = betas
        self.limits = limits


class ModuleB(BaseModule):
    def __init__(self, model_name: str | None = None, lr: float = 0.1, width: int = 3) -> None:
        super().__init__(model_name, lr)
        self.width = width


class InterruptedModule(ModuleA):
    def fail(self) -> None:
        raise KeyboardInterrupt


class TerminatedModule(ModuleA):
    def fail(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class RefusingModule(BaseModule):
    def __init__(self, model_name: str | None = None, lr: float = 0.1) -> None:
        super().__init__(model_name, lr)
        check_number("actor_lr", lr, above=0)


class BrokenModule(BaseModule):
    def __init__(self, model_name: str | None = None, lr: float = 0.1) -> None:
        super().__init__(model_name, lr)
        int("a mistake of its author")


class Rows:
    """Sized and lazy, two mini-batches per pass, as the real loader."""

    def __init__(self, data: Data, count: int) -> None:
        self.data = data
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self):
        start = self.data.position
        self.data.position += self.count
        for number in range(self.count):
            yield torch.full((1, 2), float(start + number))


class Data(L.LightningDataModule):
    def __init__(
        self,
        model_name: str | None = None,
        group_size: int = 2,
        sampling: Sampling | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__()
        self.model_name = model_name
        self.group_size = group_size
        self.sampling = sampling or Sampling()
        self.verbose = verbose
        self.position = 0
        self.phase = PhaseProgress()
        self.sources = {"train": None, "val": None, "test": None}
        self.last_trajectories = [make_trajectory("row1", 0), make_trajectory("row1", 1)]
        self.last_validation_trajectories = [make_trajectory("row9", 0)]

    def train_dataloader(self):
        return Rows(self, 2)

    def val_dataloader(self):
        return [torch.zeros(1, 2)]

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state_dict) -> None:
        self.position = state_dict["position"]

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


class NeedsEngine(Data):
    def __init__(
        self,
        model_name: str | None = None,
        group_size: int = 2,
        sampling: Sampling | None = None,
        verbose: bool = False,
    ) -> None:
        raise AssertionError("built although the configuration is wrong")


class BadCheckpoint(L.pytorch.callbacks.ModelCheckpoint):
    """A checkpoint callback that may save anywhere."""


class StandInCLI(RLCLI):
    """Without WeightSync, which needs replicas."""

    def default_callbacks(self):
        _, last = super().default_callbacks()
        return [], last


def make_trajectory(row_id: str, sample: int, **kwargs) -> Trajectory:
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
        "reward_parts": {"format": 1.0},
        "text": "4 5",
    }
    return Trajectory(**(values | kwargs))
