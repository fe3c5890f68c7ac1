"""A fit of ten short iterations over ten rows that can kill its own process at a given moment, as ``kill -9`` would.

The test runs it in a child process (`main`), and again in its own without a moment. Case O38: rows 0 to 9, two per
iteration, shuffled with seed 7, two passes.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import torch
from tiny_fit import MODEL, TinyFit, spread_reward, tiny_data, tiny_fit

from lit_rl import GRPO
from lit_rl.callbacks import IterationCheckpoint, checkpoint
from lit_rl.callbacks.checkpoint_files import StreamingCheckpointIO
from lit_rl.data import Arithmetic
from lit_rl.experience.batch import Experience
from lit_rl.serving.transformers_replica import TransformersReplica

ITERATIONS = 10
LOG = "trained.jsonl"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class TrainedLog(L.Callback):
    """Writes what each iteration has learnt from, before it is saved."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trained = [
            {"row": t.row_id, "sample": t.sample_index, "seed": t.seed, "tokens": t.response_ids}
            for t in trainer.datamodule.last_trajectories
        ]
        with self.path.open("a") as file:
            file.write(json.dumps({"iteration": trainer.current_epoch, "trained": trained}) + "\n")


class KilledModule(GRPO):
    """Dies after the log-probs are scored, before the advantages are used."""

    at: ClassVar[int] = -1

    def compute_advantages(self, experience: Experience) -> torch.Tensor:
        if self.current_epoch == self.at:
            kill()
        return super().compute_advantages(experience)


class KilledAfterTheFirstStep(L.Callback):
    """Dies between the two optimizer steps of an iteration."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.current_epoch == self.at:
            assert not trainer.is_last_batch
            kill()


class KilledReplica(TransformersReplica):
    """Dies with some of the new weights loaded."""

    at: ClassVar[int] = -1
    num_buckets: ClassVar[int] = 0

    async def update_weights(self, bucket: dict[str, Any]) -> None:
        await super().update_weights(bucket)
        if self.version == KilledReplica.at:
            KilledReplica.num_buckets += 1
            if KilledReplica.num_buckets == 2:
                kill()


class KilledDisk(StreamingCheckpointIO):
    """Dies with half of the file written."""

    def __init__(self, at: int) -> None:
        self.at = at

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if checkpoint["epoch"] == self.at:
            content = io.BytesIO()
            torch.save(checkpoint, content)
            Path(path).write_bytes(content.getvalue()[: content.tell() // 2])
            kill()
        super().save_checkpoint(checkpoint, path, storage_options)


def survivor(folder: Path, moment: str = "", at: int = -1) -> TinyFit:
    """The fit; with a moment it dies there in iteration ``at``."""
    calls = []

    def reward(solution_str: str, ground_truth: str) -> float:
        if moment == "rollout" and run.trainer.current_epoch == at:
            calls.append(solution_str)
            if len(calls) == 2:
                kill()
        return spread_reward(solution_str, ground_truth)

    serving: dict[str, Any] = {"weight_bucket_mib": 4}
    callbacks: list[L.Callback] = []
    options: dict[str, Any] = {}
    module: type[GRPO] = GRPO
    if moment == "scoring":
        KilledModule.at = at
        module = KilledModule
    elif moment == "update":
        callbacks = [KilledAfterTheFirstStep(at)]
    elif moment == "sync":
        KilledReplica.at = at
        serving["replica"] = "killed_fit.KilledReplica"
    elif moment == "save":
        options["plugins"] = [KilledDisk(at)]
    elif moment == "link":
        link_last = checkpoint.link_last
        checkpoint.link_last = lambda path: kill() if f"{at:05d}" in path.name else link_last(path)
    data = tiny_data(
        reward,
        serving,
        train_data=Arithmetic(split="train", num_rows=10, max_operand=9),
        val_data=None,
        prompts_per_iteration=2,
        group_size=4,
        num_mini_batches=2,
        max_response_tokens=4,
        seed=7,
    )
    run = tiny_fit(
        ITERATIONS,
        data=data,
        module=module(MODEL, actor_lr=1e-3, lr_warmup_iterations=6),
        callbacks=[*callbacks, TrainedLog(folder), IterationCheckpoint()],
        default_root_dir=folder,
        **options,
    )
    return run


def main() -> None:
    """Arguments: folder, moment, iteration."""
    torch.set_num_threads(1)
    folder, moment, at = sys.argv[1:]
    survivor(Path(folder), moment, int(at)).fit()
