"""Supervised fine-tuning through the real entry point: fit, resume, validate, export, and RL from what was exported."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml

from lit_rl.cli import build_from_config

MODEL = "bundled/tiny-random"


def write_recipe(folder: Path) -> str:
    words = ["red", "blue", "green", "black", "white", "brown"]
    rows = [
        {"messages": [{"role": "user", "content": word}, {"role": "assistant", "content": f"{word} it is"}]}
        for word in words
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "val.jsonl").write_text(json.dumps(rows[0]))
    files = "lit_rl.data.ConversationFiles"
    recipe = {
        "model_name": MODEL,
        "trainer": {"accelerator": "cpu", "devices": 1, "precision": "bf16-mixed", "max_epochs": 2},
        "model": {"class_path": "lit_rl.SFT", "init_args": {"actor_lr": 1e-3}},
        "data": {
            "class_path": "lit_rl.SFTDataModule",
            "init_args": {
                "train_data": {"class_path": files, "init_args": {"files": ["train.jsonl"]}},
                "val_data": {"class_path": files, "init_args": {"files": ["val.jsonl"]}},
                "batch_size": 3,
            },
        },
    }
    (folder / "warm.yaml").write_text(yaml.safe_dump(recipe))
    return "warm.yaml"


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_warm_up_through_the_command_line(lit_rl, tmp_path, monkeypatch) -> None:
    fitted = lit_rl("fit", "--config", write_recipe(tmp_path))
    assert fitted.wait(300) == 0, fitted.stderr

    (run,) = (tmp_path / "runs/warm").iterdir()
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == {
        "config.yaml",
        "metrics.csv",
        "checkpoints/iteration_00001.ckpt",
        "checkpoints/last.ckpt",
    }
    lines = [line for line in fitted.stdout.splitlines() if line.startswith("iteration")]
    assert [line.split()[1:3] for line in lines] == [["0", "loss"], ["1", "loss"]]
    assert all("validation loss" in line for line in lines)
    table = rows_of(run)
    assert [row["iteration"] for row in table[:2]] == ["0.0", "1.0"]
    assert float(table[1]["train/loss"]) < float(table[0]["train/loss"])
    assert float(table[2]["val/loss"]) < float(table[1]["val/loss"])

    resumed = lit_rl("fit", "--config", "warm.yaml", "--trainer.max_epochs=3", "--ckpt_path", str(run))
    assert resumed.wait(300) == 0, resumed.stderr
    assert [line.split()[1] for line in resumed.stdout.splitlines() if line.startswith("iteration")] == ["2"]

    exported = lit_rl("export", "--ckpt_path", str(run), "--out", "warm")
    assert exported.wait(300) == 0, exported.stderr
    validated = lit_rl("validate", "--config", "warm.yaml", "--ckpt_path", str(run), "--run_name=again")
    assert validated.wait(300) == 0, validated.stderr
    ((again,),) = [list((tmp_path / "runs/again").iterdir())]
    assert float(rows_of(again)[-1]["val/loss"]) == pytest.approx(float(table[2]["val/loss"]), rel=1e-5)

    # The exported folder is a model like any other.
    monkeypatch.chdir(tmp_path)
    cli = build_from_config("warm.yaml", ["--model_name=warm", "--runs_dir=more", "--trainer.max_epochs=1"])
    cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
    assert float(cli.trainer.callback_metrics["val/loss"]) == pytest.approx(float(table[2]["val/loss"]), rel=0.02)


def test_a_faulty_run_is_refused_in_one_line(lit_rl, tmp_path) -> None:
    write_recipe(tmp_path)

    wrong_pair = lit_rl("fit", "--config", "warm.yaml", "--model=lit_rl.GRPO")
    assert wrong_pair.wait(300) != 0
    assert "GRPO learns from a MiniBatch, SFTDataModule serves a ConversationBatch" in wrong_pair.stderr

    (tmp_path / "train.jsonl").write_text('{"messages": [{"role": "user", "content": "red"}]}')
    no_answer = lit_rl("fit", "--config", "warm.yaml")
    assert no_answer.wait(300) == 2
    assert no_answer.stderr.splitlines()[-1].startswith(
        "lit-rl: error: train.jsonl, row 0: column 'messages' has no as"
    )
