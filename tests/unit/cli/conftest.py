from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from cli_standin import BaseModule, Data, StandInCLI

RECIPE = {
    "model_name": "some/model",
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "devices": 1},
    "model": {"class_path": "cli_standin.ModuleA", "init_args": {"hidden": 8, "lr": 0.25}},
    "data": {"class_path": "cli_standin.Data", "init_args": {"group_size": 3, "sampling": {"temperature": 0.5}}},
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Each test runs as a program would, and leaves environment, log levels and warning filters as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lit-rl"])
    environment = dict(os.environ)
    levels = {
        name: logging.getLogger(name).level for name in ("lightning", "lightning.pytorch", "lightning.fabric", "ray")
    }
    with warnings.catch_warnings():
        yield
    os.environ.clear()
    os.environ.update(environment)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def recipe(tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture
def write_yaml(tmp_path):
    def write(name: str, content: dict) -> str:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


@pytest.fixture
def fit(recipe):
    """Run ``lit-rl fit --config recipe.yaml ARGS`` with the stand-in classes."""

    def run(*args: str, subcommand: str = "fit", config: str | None = None) -> StandInCLI:
        return StandInCLI(BaseModule, Data, args=[subcommand, "--config", config or "recipe.yaml", *args])

    return run


@pytest.fixture
def parse(recipe):
    """Parse and build without running."""

    def run(*args: str) -> StandInCLI:
        return StandInCLI(BaseModule, Data, args=["--config", "recipe.yaml", *args], run=False)

    return run
