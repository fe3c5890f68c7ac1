"""The example of an own algorithm, through the command line as its first comment says."""

from __future__ import annotations

from pathlib import Path

from tagged_run import write_recipe

EXAMPLE = Path(__file__).parents[2] / "examples/custom_algorithm.py"


def test_an_own_algorithm_is_named_on_the_command_line(lit_rl, tmp_path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 25
    arguments = ["--config", write_recipe(tmp_path), "--model", "custom_algorithm.RankPolicy"]

    run = lit_rl("fit", *arguments, env={"PYTHONPATH": str(EXAMPLE.parent)})

    assert run.wait(180) == 0, run.stderr
    (config,) = tmp_path.glob("runs/*/*/config.yaml")
    assert "class_path: custom_algorithm.RankPolicy" in config.read_text()
