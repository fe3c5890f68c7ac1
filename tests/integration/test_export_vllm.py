"""RL with adapters over a real vLLM engine, from a warmed-up model that was exported."""

from __future__ import annotations

import csv

import lightning as L
import pytest
from tagged_run import the_run_folder, write_recipe

from lit_rl import SFT, SFTDataModule
from lit_rl.callbacks import IterationCheckpoint
from lit_rl.data import AnsweredPrompts, Arithmetic
from lit_rl.export_command import export
from lit_rl.models.lora import LoraSettings

pytestmark = pytest.mark.engine

MODEL = "bundled/tiny-random"


def test_vllm_loads_an_exported_model_and_takes_merged_adapters(lit_rl, tmp_path) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, default_root_dir=str(tmp_path / "warmed"),
        enable_progress_bar=False, enable_model_summary=False, callbacks=[IterationCheckpoint()],
    )  # fmt: skip
    answers = AnsweredPrompts(Arithmetic(split="train", num_rows=12, max_operand=9))
    trainer.fit(SFT(MODEL, actor_lr=1e-3, lora=LoraSettings(r=4)), datamodule=SFTDataModule(MODEL, answers))
    export(tmp_path / "warmed", tmp_path / "model", dtype="float32")
    recipe = write_recipe(
        tmp_path,
        model_name="./model",
        model__init_args__lora={"r": 4},
        model__init_args__kl_loss_coef=0.01,
        data__init_args__backend="ray",
        data__init_args__num_cpus=2,
        data__init_args__serving={"dtype": "float32", "kv_cache_gib": 0.25, "threads_per_replica": 1},
    )

    run = lit_rl("fit", "--config", recipe)

    assert run.wait(540) == 0, run.stderr
    with (the_run_folder(tmp_path) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert max(float(row["rollout_corr/logprob_gap_max"]) for row in rows[:2]) < 1e-3
    assert float(rows[0]["actor/kl_loss"]) == pytest.approx(0.0, abs=1e-6)
    assert float(rows[1]["actor/kl_loss"]) > 0
