"""Every file in ``configs/`` parses with the real classes, and the sweep's command line does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lit_rl.cli import DEFAULT_DATA, RLCLI, base_classes

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted(CONFIGS.glob("*.yaml"))
SWEEPS = sorted((CONFIGS / "sweeps").glob("*.yaml"))


class ParseOnly(RLCLI):
    """Stops before anything is built."""

    def instantiate_classes(self) -> None:
        pass


def _parse(*args: str) -> ParseOnly:
    return ParseOnly(*base_classes(), args=list(args), run=False, default_data=DEFAULT_DATA)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_parses_alone_and_over_the_base(recipe) -> None:
    alone = _parse("--config", str(recipe))
    over_base = _parse("--config", str(CONFIGS / "base/trainer_cpu.yaml"), "--config", str(recipe))

    assert alone.config.run_name == over_base.config.run_name == recipe.stem
    assert alone.config.data.init_args.model_name == alone.config.model_name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_short_and_says_how_to_run_it(recipe) -> None:
    lines = recipe.read_text().splitlines()

    assert len(lines) <= 80
    assert any(line.startswith("# Run: lit-rl") for line in lines)


def _agent_command(sweep: dict, values: dict) -> list[str]:
    """The command as wandb's agent forms it, offline."""
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    arguments = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    macros = {"${env}": ["/usr/bin/env"], "${args}": arguments["args"]}
    return [word for chunk in sweep["command"] for word in macros.get(chunk, [chunk])]


def test_the_sweep_agents_command_line_sets_a_boolean_a_small_number_and_a_list(monkeypatch) -> None:
    # Case O44.
    monkeypatch.chdir(CONFIGS.parent)
    sweep = yaml.safe_load((CONFIGS / "sweeps/grpo_arithmetic.yaml").read_text())
    values = {
        "model.init_args.actor_lr": 1e-6,
        "model.init_args.betas": [0.8, 0.95],
        "model.init_args.normalize_std": False,
        "data.init_args.share_prompts": True,
        "data.group_size": 4,
    }

    command = _agent_command(sweep, values)

    assert command[:4] == ["/usr/bin/env", "lit-rl", "fit", "--config"]
    config = _parse(*command[3:]).config
    assert config.model.init_args.actor_lr == 1e-6
    assert list(config.model.init_args.betas) == [0.8, 0.95]
    assert config.model.init_args.normalize_std is False
    assert config.data.init_args.share_prompts is True
    assert config.data.init_args.group_size == 4


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_value_of_a_sweep_is_accepted(path, monkeypatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    sweep = yaml.safe_load(path.read_text())
    first = {key: spec["value"] if "value" in spec else spec["values"][0] for key, spec in sweep["parameters"].items()}
    last = {key: spec["value"] if "value" in spec else spec["values"][-1] for key, spec in sweep["parameters"].items()}

    for values in (first, last):
        command = _agent_command(sweep, values)
        _parse(*command[command.index("fit") + 1 :])


def test_data_without_a_class_is_the_rollouts_and_another_class_can_be_named() -> None:
    usual = _parse("--model=lit_rl.GRPO", "--data.train_data=lit_rl.data.Arithmetic", "--data.group_size=2").config
    assert usual.data.class_path == "lit_rl.RolloutDataModule"
    assert usual.data.init_args.group_size == 2

    demonstrations = ["--data.train_data=lit_rl.data.ConversationFiles", "--data.train_data.files=[a.jsonl]"]
    other = _parse("--model=lit_rl.SFT", "--data=lit_rl.SFTDataModule", *demonstrations, "--data.batch_size=2").config
    assert other.data.class_path == "lit_rl.SFTDataModule"
    assert other.data.init_args.batch_size == 2
    assert "group_size" not in other.data.init_args


def test_the_warm_up_of_the_documentation_parses(tmp_path) -> None:
    text = (CONFIGS.parent / "docs/sft.md").read_text()
    (tmp_path / "warmup.yaml").write_text(text.split("```yaml\n")[2].split("```")[0])

    config = _parse("--config", str(tmp_path / "warmup.yaml")).config

    assert config.data.class_path == "lit_rl.WarmupDataModule"
    assert config.data.init_args.val_sampling.temperature == 0.0
    assert config.trainer.callbacks[0].init_args.stopping_threshold == 0.5


def test_lora_is_set_from_the_command_line() -> None:
    lora = _parse("--model=lit_rl.GRPO", "--data.train_data=lit_rl.data.Arithmetic", "--model.lora.r=8").config.model

    assert vars(lora.init_args.lora) == {"r": 8, "alpha": 32.0, "target_modules": "all-linear"}


def test_help_typos_and_a_model_that_cannot_be_had_start_no_engine(tmp_path) -> None:
    # Case O43, through the real entry point.
    code = """
import sys
from lit_rl.cli import main
base = ["fit", "--config", sys.argv[1]]
for args in (["--help"], [*base, "--trainer.max_epoch=1"], [*base, "--model_name=no-such/model"]):
    try:
        main(args)
    except SystemExit as stopped:
        print("exit", stopped.code)
ray = sys.modules.get("ray")
print("vllm" in sys.modules, ray is not None and getattr(ray, "is_initialized", lambda: False)())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(RECIPES[0])],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )

    assert done.stdout.splitlines()[-2:] == ["exit 2", "False False"]
    assert "exit 0" in done.stdout
    assert done.stdout.count("exit 2") == 2
    assert "unknown key 'trainer.max_epoch'. Did you mean 'trainer.max_epochs'?" in done.stderr
    assert "lit-rl: error: model_name='no-such/model' cannot be loaded" in done.stderr
    assert "Traceback" not in done.stderr
