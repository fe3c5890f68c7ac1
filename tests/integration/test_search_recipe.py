"""The search recipe from corpus to table as its command runs it, with a random model in place of the real one."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "search_r1"))

import run as recipe_module

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


class TinyRecipe(recipe_module.Recipe):
    """Inline and with few rows; the steps, their order and their files are the recipe's."""

    def lit_rl(
        self,
        command: str,
        name: str,
        model_name: str,
        data: Mapping[str, Any],
        *,
        trainer: Mapping[str, Any] | None = None,
        warmup: bool = False,
    ) -> None:
        val_data = {
            **data["val_data"],
            "init_args": {**data["val_data"]["init_args"], "max_samples": 8, "sample_seed": 0},
        }
        small = {
            "backend": "inline",
            "serving": {"replica": "transformers", "dtype": "float32"},
            "max_response_tokens": 16,
            "val_data": val_data,
        }
        trainer = {**(trainer or {}), "max_epochs": 1, "check_val_every_n_epoch": 1}
        super().lit_rl(command, name, model_name, {**data, **small}, trainer=trainer, warmup=warmup)


def test_all_steps_run_one_after_another_and_the_table_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe_module, "MODEL", "bundled/tiny-random")
    options = argparse.Namespace(
        recipe="one_hop", seed=3, rl_iterations=1, short=True, data_dir=tmp_path / "data", work_dir=tmp_path / "work"
    )
    TinyRecipe(options).run()

    done = json.loads((tmp_path / "work/results.json").read_text())
    assert list(done["stages"]) == ["warmed up", "then reinforcement learning"]
    assert list(done["minutes"]) == [
        "corpus", "build_index", "demonstrations", "warmup", "export_warmup", "rl", "export_rl"
    ]  # fmt: skip
    assert done["stages"]["warmed up"]["format"] == 0.0  # a random model writes no call
    assert (tmp_path / "work/final/config.json").exists()
    table = (tmp_path / "work/results.md").read_text()
    assert table.count("\n") == 4
    assert table.strip() in capsys.readouterr().out
    # A second run finds corpus and index.
    again = TinyRecipe(options)
    again.prepare()
    assert list(again.minutes) == ["demonstrations"]


def test_a_step_that_fails_ends_the_recipe_with_its_name(tmp_path: Path) -> None:
    options = argparse.Namespace(
        recipe="one_hop", seed=3, rl_iterations=1, short=True, data_dir=tmp_path / "data", work_dir=tmp_path / "work"
    )
    with pytest.raises(SystemExit, match="run: demonstrations ended with status 1"):
        recipe_module.Recipe(options).script("demonstrations.py", f"--data_dir={tmp_path}")
