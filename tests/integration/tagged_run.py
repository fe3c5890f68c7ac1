"""The command line in a process of its own, and every process that comes of it.

Its processes are known by a variable in their environment and by having been below the driver when it was looked at:
Ray's workers rewrite the memory their environment is read from, and a killed driver has no children any more.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

_TAG = "LIT_RL_TEST_RUN"
_POLL_S = 0.1
_NUMBERS = itertools.count()


class TaggedRun:
    """A started ``lit-rl`` command."""

    def __init__(self, args: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> None:
        self.tag = uuid.uuid4().hex
        self.folder = folder
        number = next(_NUMBERS)
        self._files = [folder / f"stdout_{number}.txt", folder / f"stderr_{number}.txt"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {}), _TAG: self.tag}
        self.started = time.monotonic()
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lit_rl.cli", *args],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,  # a process group of its own, as a shell gives it
            )
        self.seen: set[psutil.Process] = set()

    @property
    def stdout(self) -> str:
        return self._files[0].read_text()

    @property
    def stderr(self) -> str:
        return self._files[1].read_text()

    def look(self) -> None:
        """Note the processes below the driver."""
        with contextlib.suppress(psutil.Error):
            self.seen.update(psutil.Process(self.process.pid).children(recursive=True))

    def wait(self, timeout_s: float) -> int:
        """Exit code, once it has ended."""
        self.wait_for(lambda: self.process.poll() is not None, timeout_s, "the command to end")
        return int(self.process.returncode)

    def wait_for(self, is_reached: Callable[[], Any], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_reached():
            self.look()
            ended = self.process.poll() is not None and not is_reached()
            assert not ended, f"{what}: it ended with {self.process.returncode}\n{self.stdout}\n{self.stderr}"
            assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s\n{self.stdout}\n{self.stderr}"
            time.sleep(_POLL_S)

    def left_over(self, timeout_s: float) -> list[str]:
        """Processes of this run that are still there after at most ``timeout_s`` seconds, the driver not among them."""
        deadline = time.monotonic() + timeout_s
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [_describe(process) for process in alive]

    def end(self) -> None:
        """Kill what is left."""
        self.look()
        for process in [*self._alive(), *([] if self.process.poll() is not None else [self.process])]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(10)

    def _alive(self) -> list[psutil.Process]:
        tagged = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_TAG) == self.tag:
                    tagged.append(process)
        everything = self.seen.union(tagged)
        return [process for process in everything if process.pid != self.process.pid and _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _describe(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    return str(process.pid)


REWARD_FILE = '''
def compute_score(solution_str, ground_truth):
    """Differs from answer to answer; a random model is never right."""
    return sum(solution_str.encode()) % 5 / 4
'''


def write_recipe(folder: Path, name: str = "tiny.yaml", **changes: Any) -> str:
    """A recipe of two short iterations in the style of ``configs/``; ``changes`` name keys with ``__`` for dots."""
    (folder / "tiny_rewards.py").write_text(REWARD_FILE)
    arithmetic = {"class_path": "lit_rl.data.Arithmetic"}
    recipe: dict[str, Any] = {
        "model_name": "bundled/tiny-random",
        "trainer": {
            "accelerator": "cpu",
            "devices": 1,
            "precision": "32-true",
            "max_epochs": 2,
            "check_val_every_n_epoch": 1,
        },
        "model": {"class_path": "lit_rl.modules.GRPO", "init_args": {"actor_lr": 1e-3}},
        "data": {
            "class_path": "lit_rl.RolloutDataModule",
            "init_args": {
                "train_data": {**arithmetic, "init_args": {"split": "train", "num_rows": 12, "max_operand": 9}},
                "val_data": {**arithmetic, "init_args": {"split": "val", "num_rows": 3, "max_operand": 9}},
                "prompts_per_iteration": 2,
                "group_size": 4,
                "max_prompt_tokens": 64,
                "max_response_tokens": 6,
                "max_tokens_per_micro_batch": 256,
                "backend": "inline",
                "agents": {"num_workers": 1},
                "rewards": {"function": str(folder / "tiny_rewards.py"), "num_workers": 1},
                "serving": {"replica": "transformers", "dtype": "float32", "max_num_seqs": 1},
            },
        },
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        place = recipe
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    (folder / name).write_text(yaml.safe_dump(recipe))
    return name


def the_run_folder(folder: Path, name: str = "tiny") -> Path:
    """The only run of that name."""
    (run,) = (folder / "runs" / name).iterdir()
    return run
