"""What holds for the whole repository: cheap import, import layers, readable configuration files, a valid CI script."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lit_rl

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "vllm", "lightning", "transformers", "deepspeed", "wandb", "matplotlib")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded once it ran ``code``."""
    script = (
        f"import os, sys; before = dict(os.environ); {code}; assert dict(os.environ) == before, 'environment changed'"
    )
    script += "; print(*{name.partition('.')[0] for name in sys.modules})"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    return set(process.stdout.split())


@pytest.mark.parametrize("statement", ["import lit_rl", "import lit_rl.types"])
def test_import_loads_nothing_heavy_and_leaves_the_environment_alone(statement: str) -> None:
    assert modules_after(statement).isdisjoint(HEAVY)


def test_rollout_side_loads_no_torch() -> None:
    loaded = modules_after("import lit_rl.tools, lit_rl.agents, lit_rl.rewards")

    assert loaded.isdisjoint({"torch", "lightning", "vllm"})


@pytest.mark.parametrize(
    "package", ["lit_rl", *(m.name for m in pkgutil.iter_modules(lit_rl.__path__, "lit_rl.") if m.ispkg)]
)
def test_every_public_name_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)

    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None


def test_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_algorithm"):
        lit_rl.no_such_algorithm  # noqa: B018


def test_imports_keep_to_the_layers() -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    process = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "120"}
    )

    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_configuration_file_is_readable_and_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()

    assert isinstance(yaml.safe_load(text), dict)
    assert text.startswith("# "), "the first comment states purpose, hardware, expected result and time"
    assert len(text.splitlines()) <= 80, "a recipe is an overlay of at most 80 lines"


def test_ci_script_is_valid_bash() -> None:
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], timeout=10).returncode == 0
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_accuracy_of_a_run_is_read_from_its_metrics(tmp_path: Path) -> None:
    run = tmp_path / "run" / "time"
    run.mkdir(parents=True)
    rows = ["step,critic/score/mean,val-core/sums/reward/mean@1", "0,0.3,0.44", "1,0.4,", "2,,0.5", "10,,0.81"]
    (run / "metrics.csv").write_text("\n".join(rows) + "\n")
    script = ROOT / "examples" / "accuracy_of_run.py"

    process = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=60)

    assert process.stdout == "Held-out reward, sums: 0.440 before training, 0.810 after 10 iterations.\n"
