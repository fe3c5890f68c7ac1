"""The real entry point in processes of its own: what a run leaves, and what stops one before anything starts."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from tagged_run import the_run_folder, write_recipe

from lit_rl.cli import build_from_config

REWARD = "val-core/arithmetic/reward/mean@1"


def _rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_its_files_and_its_checkpoint_scores_as_it_did(lit_rl, tmp_path, monkeypatch) -> None:
    fitted = lit_rl("fit", "--config", write_recipe(tmp_path))
    assert fitted.wait(180) == 0, fitted.stderr

    run = the_run_folder(tmp_path)
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == {
        "config.yaml",
        "metrics.csv",
        "reward.png",
        "checkpoints/iteration_00001.ckpt",
        "checkpoints/last.ckpt",
        "trajectories/iteration_00000.jsonl",
        "trajectories/iteration_00001.jsonl",
        "trajectories/validation_00001.jsonl",
        "trajectories/validation_00002.jsonl",
    }
    assert [row["iteration"] for row in _rows(run)[:2]] == ["0.0", "1.0"]
    assert (run / "reward.png").read_bytes().startswith(b"\x89PNG")
    lines = [json.loads(line) for line in (run / "trajectories/iteration_00001.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert {line["policy_version_min"] for line in lines} == {1}
    assert str(run.relative_to(tmp_path)) in fitted.stdout.splitlines()[-1]
    assert fitted.left_over(5.0) == []

    _assert_saved_config_gives_the_run_again(run, tmp_path, monkeypatch)
    _assert_checkpoint_scores_as_it_did(lit_rl, run)


def _assert_saved_config_gives_the_run_again(run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # O44
    monkeypatch.chdir(folder)
    again = build_from_config(run / "config.yaml", ["--runs_dir=again"])
    saved, parsed = (yaml.safe_load((place / "config.yaml").read_text()) for place in (run, again.run_folder))
    assert parsed.pop("runs_dir") == "again"
    assert saved.pop("runs_dir") == "runs"
    # Arguments of the sub-command fit, not of the objects.
    assert parsed == {key: value for key, value in saved.items() if key not in ("ckpt_path", "weights_only")}


def _assert_checkpoint_scores_as_it_did(lit_rl, run: Path) -> None:
    (before,) = (float(row[REWARD]) for row in _rows(run) if row["step"] == "2")
    config = str(run / "config.yaml")
    validated = lit_rl("validate", "--config", config, "--ckpt_path", str(run / "checkpoints/last.ckpt"))
    assert validated.wait(180) == 0, validated.stderr
    (other,) = (path for path in run.parent.iterdir() if path != run)
    lines = [json.loads(line) for line in (other / "trajectories/validation.jsonl").read_text().splitlines()]
    assert {line["policy_version_min"] for line in lines} == {2}
    assert sum(line["score"] for line in lines) / len(lines) == pytest.approx(before)
    known = [json.loads(line) for line in (run / "trajectories/validation_00002.jsonl").read_text().splitlines()]
    assert [line["output"] for line in lines] == [line["output"] for line in known]


def test_two_runs_at_once_do_not_meet(lit_rl, tmp_path) -> None:  # O44
    recipe = write_recipe(tmp_path, trainer__max_epochs=1)

    both = [lit_rl("fit", "--config", recipe) for _ in range(2)]

    assert [run.wait(240) for run in both] == [0, 0], "".join(run.stderr for run in both)
    folders = sorted((tmp_path / "runs/tiny").iterdir())
    assert len(folders) == 2
    configs, states = [], []
    for folder in folders:
        configs.append((folder / "config.yaml").read_text())
        states.append(torch.load(folder / "checkpoints/last.ckpt", weights_only=False)["state_dict"])
    assert configs[0] == configs[1]
    # The same command computes the same: neither read or wrote anything of the other's.
    assert [name for name in states[0] if not torch.equal(states[0][name], states[1][name])] == []


def test_wandb_gets_the_whole_config_offline(lit_rl, tmp_path) -> None:  # O44
    pytest.importorskip("wandb")
    logger = [{"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"project": "test"}}]
    recipe = write_recipe(tmp_path, trainer__max_epochs=1, trainer__logger=logger, data__init_args__val_data=None)

    run = lit_rl("fit", "--config", recipe, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"})

    assert run.wait(180) == 0, run.stderr
    (record,) = the_run_folder(tmp_path).glob("wandb/offline-run-*/run-*.wandb")
    assert not (tmp_path / "wandb").exists()
    config = _config_of(record)
    assert config["model"]["init_args"]["model_name"] == "bundled/tiny-random"
    assert config["data"]["init_args"]["serving"]["max_num_seqs"] == 1
    assert config["data"]["init_args"]["train_data"]["init_args"]["num_rows"] == 12
    assert config["trainer"]["max_epochs"] == 1
    assert run.left_over(10.0) == []


def _config_of(file: Path) -> dict:
    """The config in a wandb run file."""
    records = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    config: dict = {}
    for content in _records(file.read_bytes()):
        record = records.Record.FromString(content)
        for update in (*record.run.config.update, *record.config.update):
            *parents, last = update.nested_key or [update.key]
            place = config
            for key in parents:
                place = place.setdefault(key, {})
            place[last] = json.loads(update.value_json)
    return config


def _records(content: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format: 32 KiB blocks of fragments (checksum, length, kind); 7 bytes before them."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        if (left_in_block := 32768 - position % 32768) < 7:
            position += left_in_block
            continue
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def _row(index: int, **reward_model: str) -> str:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {index} + 1?"}],
        "reward_model": {"style": "rule", **reward_model},
        "extra_info": {"index": index, "split": "train"},
    }
    return json.dumps(row)


def test_a_row_without_its_answer_stops_the_run_before_ray_starts(lit_rl, tmp_path) -> None:  # O48
    (tmp_path / "rows.jsonl").write_text("\n".join([_row(0, ground_truth="1"), _row(1)]))
    source = {"class_path": "lit_rl.data.PromptFiles", "init_args": {"files": ["rows.jsonl"]}}
    recipe = write_recipe(tmp_path, data__init_args__train_data=source, data__init_args__backend="ray")

    run = lit_rl("fit", "--config", recipe)

    assert run.wait(120) != 0
    assert "rows.jsonl, row 1" in run.stderr
    assert "ground_truth" in run.stderr
    assert run.seen == set()  # no daemon, no worker, no engine


def test_a_class_that_does_not_exist_stops_the_run_before_ray_starts(lit_rl, tmp_path) -> None:  # O43
    source = {"class_path": "lit_rl.data.Arithmetik"}
    recipe = write_recipe(tmp_path, data__init_args__train_data=source, data__init_args__backend="ray")

    run = lit_rl("fit", "--config", recipe)

    assert run.wait(120) == 2
    assert "lit_rl.data.Arithmetik" in run.stderr
    assert run.seen == set()
    assert not (tmp_path / "runs").exists()
