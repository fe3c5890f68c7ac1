"""Every overlay of ``configs/algorithms`` parses over the quickstart's recipe, with the real classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_rl import PolicyGradientModule, RolloutDataModule, modules
from lit_rl.cli import RLCLI

CONFIGS = Path(__file__).parents[3] / "configs"
OVERLAYS = sorted((CONFIGS / "algorithms").glob("*.yaml"))


class ParseOnly(RLCLI):
    """Stops before anything is built."""

    def instantiate_classes(self) -> None:
        pass


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.stem)
def test_an_overlay_changes_the_algorithm_and_keeps_the_recipe(overlay: Path) -> None:
    files = [CONFIGS / "base/trainer_cpu.yaml", CONFIGS / "grpo_arithmetic.yaml", overlay]
    arguments = [word for path in files for word in ("--config", str(path))]

    config = ParseOnly(PolicyGradientModule, RolloutDataModule, args=arguments, run=False).config

    assert config.run_name == overlay.stem
    assert config.model.init_args.actor_lr == 2e-5
    assert config.data.init_args.max_response_tokens == 16
    assert config.data.init_args.train_data.init_args.split == "train"
    name = config.model.class_path.rpartition(".")[2]
    module = getattr(modules, name)(**{"model_name": "unused", **config.model.init_args.as_dict()})
    module.check_data(config.data.init_args)
    assert f"--config configs/algorithms/{overlay.name}" in overlay.read_text().splitlines()[1]


def test_every_method_has_an_overlay() -> None:
    bases = {"ClippedPolicyModule", "GroupRelativeModule", "PolicyGradientModule", "TokenRewardModule"}
    bases |= {"SFT"}  # learns from demonstrations: no overlay of an RL recipe
    named = {
        line.rpartition(".")[2] for path in OVERLAYS for line in path.read_text().splitlines() if "modules." in line
    }

    assert named == set(modules.__all__) - bases
