"""Every method, with the settings of its file in ``configs/algorithms``, learns a contextual bandit on a CPU.

One seed here; ``python bench/learning_curves.py`` draws three and prints the table of docs/algorithms.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bandit import CHANCE, learn, save_tiny_model

from lit_rl import modules

# Distillation learns from a teacher's replicas, which the bandit has not: see test_distillation_fit.py.
CONFIGS = sorted(
    path for path in (Path(__file__).parents[2] / "configs/algorithms").glob("*.yaml") if path.stem != "distillation"
)
ITERATIONS = 40
LEVEL = 0.6
"""Mean reward of the last five iterations that a method must reach; chance earns 0.25, the best policy 1."""
LEVELS = {"pass_at_k": 0.45}
"""Pass@k reinforces one answer of a group at most, none where two share the best reward, and learns the mean slowly."""


def learning_curve(path: Path, model_folder: str, seed: int) -> list[float]:
    """Mean reward of each iteration with a configuration file's settings and a learning rate for the toy."""
    config = yaml.safe_load(path.read_text())
    name = config["model"]["class_path"].rpartition(".")[2]
    options: dict[str, Any] = {key: _number(value) for key, value in config["model"].get("init_args", {}).items()}
    options |= {"actor_lr": 1e-2} | ({"critic_lr": 1e-2} if name in ("PPO", "PFPPO", "VAPO") else {})
    data = config.get("data", {}).get("init_args", {})
    torch.manual_seed(seed)
    module = getattr(modules, name)(model_folder, **options)
    rewards = learn(module, ITERATIONS, seed, num_mini_batches=data.get("num_mini_batches", 1))
    assert rewards[0] == pytest.approx(CHANCE, abs=0.15), "the policy began with knowledge"
    return rewards


def final_reward(rewards: list[float]) -> float:
    """Mean of the last five iterations."""
    return sum(rewards[-5:]) / 5


def _number(value: Any) -> Any:
    # PyYAML reads 1e-4 as text, jsonargparse as a number; a method's options here are numbers or words.
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("bandit"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_method_learns(path: Path, model_folder: str) -> None:
    assert final_reward(learning_curve(path, model_folder, seed=0)) > LEVELS.get(path.stem, LEVEL)
