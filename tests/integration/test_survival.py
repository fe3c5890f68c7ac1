"""Runs that end badly: what they say, what they keep, and that no process stays behind (issue 2, "Must survive")."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import lightning as L
import pytest
import torch
from tagged_run import TaggedRun, the_run_folder, write_recipe
from tiny_fit import MODEL, tiny_fit

from lit_rl.callbacks import IterationCheckpoint
from lit_rl.models import resolve_model
from lit_rl.run_folder import last_checkpoint

# Scores the eight trajectories of iteration 0; the next ones wait in a thread that nothing can end but its process.
BLOCKING_REWARD = """
import time
from pathlib import Path

FOLDER = Path(__file__).parent

def compute_score(solution_str, ground_truth):
    with (FOLDER / "calls").open("a") as calls:
        calls.write("x")
        num_calls = calls.tell()
    if num_calls > 8 and not (FOLDER / "unblocked").exists():
        (FOLDER / "blocked").touch()
        time.sleep(600)
    return sum(solution_str.encode()) % 5 / 4
"""


@pytest.fixture
def blocked_run(lit_rl: Callable[..., TaggedRun], tmp_path: Path) -> TaggedRun:
    """A run over Ray that has saved iteration 0 and hangs in the rollout of iteration 1."""
    (tmp_path / "blocking.py").write_text(BLOCKING_REWARD)
    recipe = write_recipe(
        tmp_path,
        data__init_args__backend="ray",
        data__init_args__num_cpus=2,
        data__init_args__val_data=None,
        data__init_args__rewards={"function": str(tmp_path / "blocking.py"), "num_workers": 1},
    )
    run = lit_rl("fit", "--config", recipe)
    run.wait_for((tmp_path / "blocked").exists, 240, "the second rollout to begin")
    run.look()
    assert len(run.seen) >= 5  # daemons, replica, balancer, agent and reward worker
    return run


def test_an_interrupted_run_goes_on_where_it_was(blocked_run, lit_rl, tmp_path) -> None:
    os.killpg(blocked_run.process.pid, signal.SIGINT)  # a terminal sends it to everything in the foreground

    _assert_stopped(blocked_run, 130, "Interrupted")
    (tmp_path / "unblocked").touch()
    interrupted = the_run_folder(tmp_path)
    (command,) = re.findall(r"Resume with: lit-rl (.*)", blocked_run.stderr)
    # Inline, to start faster; where samples come from is no part of what a checkpoint holds. The learning rate is, and
    # the command line wins (D16).
    changes = ["--data.init_args.backend=inline", "--model.init_args.actor_lr=2e-4"]
    resumed = lit_rl(*shlex.split(command), *changes)

    assert resumed.wait(180) == 0, resumed.stderr
    (folder,) = (path for path in (tmp_path / "runs/tiny").iterdir() if path != interrupted)
    assert (folder / "checkpoints/last.ckpt").resolve().name == "iteration_00001.ckpt"
    with (folder / "metrics.csv").open() as file:
        rates = [float(row["actor/lr"]) for row in csv.DictReader(file) if row["actor/lr"]]
    assert rates == [pytest.approx(2e-4)]
    assert "differ from the configuration's" in resumed.stderr
    lines = [json.loads(line) for line in (folder / "trajectories/iteration_00001.jsonl").read_text().splitlines()]
    assert {line["policy_version_max"] for line in lines} == {1}
    assert not (folder / "trajectories/iteration_00000.jsonl").exists()


def test_a_terminated_run_keeps_its_last_iteration(blocked_run, tmp_path) -> None:
    blocked_run.process.terminate()  # a scheduler sends it to the process it started

    # Ray would have made it 15, without a word about the checkpoint.
    _assert_stopped(blocked_run, 143, "Terminated")
    checkpoint = torch.load(the_run_folder(tmp_path) / "checkpoints/last.ckpt", weights_only=False)
    assert checkpoint["lit_rl_policy_version"] == 1


def _assert_stopped(run: TaggedRun, code: int, word: str) -> None:
    """It ended within 15 s with nothing left, and says what it kept."""
    assert run.wait(15) == code, run.stderr
    assert run.left_over(0.0) == []
    assert f"{word}; iteration_00000.ckpt is kept. Resume with: lit-rl fit" in run.stderr
    assert "Traceback" not in run.stderr
    assert not list(Path("/dev/shm").glob(f"lit_rl_weights_{run.process.pid}_*"))


def test_a_killed_driver_leaves_no_process(blocked_run, tmp_path) -> None:
    blocked_run.process.kill()

    assert blocked_run.wait(5) == -signal.SIGKILL
    assert blocked_run.left_over(15.0) == []
    assert last_checkpoint(the_run_folder(tmp_path)) is not None


@pytest.fixture
def model_without_weights(tmp_path: Path) -> str:
    """A folder with config and tokenizer, and a weights file that was cut short."""
    folder = tmp_path / "broken_model"
    shutil.copytree(resolve_model(MODEL), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return str(folder)


def test_an_engine_that_cannot_load_its_model_says_why_and_leaves_nothing(
    lit_rl, tmp_path, model_without_weights
) -> None:
    recipe = write_recipe(tmp_path, model_name=model_without_weights, data__init_args__backend="ray")

    run = lit_rl("fit", "--config", recipe)

    assert run.wait(120) == 1
    last_line = run.stderr.strip().splitlines()[-1]
    assert f"data.serving.replica=transformers) did not start with model '{model_without_weights}'" in last_line
    assert "SafetensorError" in last_line
    assert run.seen != set()
    assert run.left_over(5.0) == []


@pytest.mark.engine
def test_an_option_that_vllm_refuses_is_named_and_leaves_nothing(lit_rl, tmp_path) -> None:
    recipe = write_recipe(
        tmp_path,
        data__init_args__backend="ray",
        data__init_args__serving={"replica": "vllm", "kv_cache_gib": 0.25, "engine_args": {"block_sise": 16}},
    )

    run = lit_rl("fit", "--config", recipe)

    assert run.wait(180) == 1
    assert "data.serving.replica=vllm" in run.stderr
    assert "block_sise" in run.stderr
    assert run.left_over(5.0) == []


# A checkpoint of the tiny model with AdamW's state takes 38 MB: the disk has room for one and not for two.
_DISK_BYTES = 60 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that fills up; skips where mounting is not allowed."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.usefixtures("nothing_left")
def test_a_full_disk_keeps_the_last_good_checkpoint(small_disk) -> None:
    run = tiny_fit(3, callbacks=[IterationCheckpoint(dirpath=str(small_disk))])

    with pytest.raises(
        RuntimeError, match=r"Could not save checkpoint .*iteration_00001\.ckpt.*is intact: .*iteration_00000\.ckpt"
    ):
        run.fit()

    _assert_only_the_first_is_there(small_disk)


@pytest.mark.usefixtures("nothing_left")
def test_a_write_that_fails_half_way_keeps_the_last_good_checkpoint(tmp_path) -> None:
    class LowerTheLimit(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20 << 20, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run = tiny_fit(3, callbacks=[LowerTheLimit(), IterationCheckpoint(dirpath=str(tmp_path / "disk"))])
    try:
        with pytest.raises(RuntimeError, match=r"Could not save checkpoint .*is intact: .*iteration_00000\.ckpt"):
            run.fit()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    _assert_only_the_first_is_there(tmp_path / "disk")


def _assert_only_the_first_is_there(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["iteration_00000.ckpt", "last.ckpt"]
    checkpoint = torch.load(folder / "last.ckpt", weights_only=False)
    assert checkpoint["lit_rl_policy_version"] == 1
    assert checkpoint["epoch"] == 0
