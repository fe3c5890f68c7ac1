"""A fit whose rewards come from a reward model that the run serves, configured as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_classifier import save_tiny_classifier

from lit_rl.cli import build_from_config

pytestmark = pytest.mark.usefixtures("nothing_left")

ROOT = Path(__file__).parents[2]


def test_a_fit_is_rewarded_by_a_served_classifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    folder = save_tiny_classifier(tmp_path / "classifier")
    rewards = {
        "models": {
            "rm": {
                "model_name": folder,
                "kind": "classifier",
                "max_model_len": 1024,
                "serving": {"replica": "transformers", "dtype": "float32"},
            }
        },
        "function": "lit_rl.rewards.reward_model:compute_score",
        "kwargs": {"model": "rm"},
        "num_workers": 1,
    }
    options = [
        f"--runs_dir={tmp_path}",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        f"--data.init_args.rewards={json.dumps(rewards)}",
    ]
    run = build_from_config("examples/own_parts.yaml", options)
    run.trainer.fit(run.model, datamodule=run.datamodule)

    assert run.run_folder is not None
    lines = (run.run_folder / "trajectories" / "iteration_00000.jsonl").read_text().splitlines()
    trajectories = [json.loads(line) for line in lines]
    assert [trajectory["error"] for trajectory in trajectories] == [None] * 8
    scores = [trajectory["score"] for trajectory in trajectories]
    assert len({round(score, 5) for score in scores}) > 1
