"""A driver killed while engines sample in other processes: what is asked for is equal, what is sampled is measured.

Engines that batch requests do not compute the same numbers twice, so tokens of a live rerun may differ; how many do is
reported as a property of the test and printed. A replay has no such doubt (`test_replay`).
"""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tagged_run import TaggedRun, the_run_folder, write_recipe

ITERATIONS = 4
# Hangs in the second iteration, so that the test can kill the driver there, until it is told to go on.
REWARD = """
import time
from pathlib import Path

FOLDER = Path(__file__).parent

def compute_score(solution_str, ground_truth):
    with (FOLDER / "calls").open("a") as calls:
        calls.write("x")
        num_calls = calls.tell()
    if num_calls > 20 and not (FOLDER / "unblocked").exists():
        (FOLDER / "blocked").touch()
        time.sleep(600)
    return sum(solution_str.encode()) % 5 / 4
"""
TRANSFORMERS = {"replica": "transformers", "dtype": "float32", "max_num_seqs": 8, "num_replicas": 2}
VLLM = {"replica": "vllm", "dtype": "float32", "kv_cache_gib": 0.25}


@pytest.mark.slow
@pytest.mark.parametrize(
    "serving",
    [pytest.param(TRANSFORMERS, id="transformers"), pytest.param(VLLM, id="vllm", marks=pytest.mark.engine)],
)
def test_a_run_killed_while_its_engines_sample_asks_for_the_same_again(
    serving: dict[str, Any], lit_rl: Callable[..., TaggedRun], tmp_path: Path, record_property: Any
) -> None:
    (tmp_path / "blocking.py").write_text(REWARD)
    recipe = write_recipe(
        tmp_path,
        trainer__max_epochs=ITERATIONS,
        data__init_args__backend="ray",
        data__init_args__num_cpus=2,
        data__init_args__val_data=None,
        data__init_args__group_size=8,
        data__init_args__max_response_tokens=32,
        data__init_args__record_trajectories=True,
        data__init_args__serving=serving,
        data__init_args__rewards={"function": str(tmp_path / "blocking.py"), "num_workers": 1},
    )
    killed = lit_rl("fit", "--config", recipe, "--run_name", "killed")
    killed.wait_for((tmp_path / "blocked").exists, 300, "the second rollout to begin")
    killed.look()
    killed.process.kill()
    assert killed.wait(5) == -signal.SIGKILL
    assert killed.left_over(15.0) == []
    (tmp_path / "unblocked").touch()
    first = the_run_folder(tmp_path, "killed")

    resumed = lit_rl("fit", "--config", recipe, "--run_name", "resumed", "--ckpt_path", str(first))
    assert resumed.wait(400) == 0, resumed.stderr
    whole = lit_rl("fit", "--config", recipe, "--run_name", "whole")
    assert whole.wait(400) == 0, whole.stderr

    rerun = _recorded(first) | _recorded(the_run_folder(tmp_path, "resumed"))
    expected = _recorded(the_run_folder(tmp_path, "whole"))
    assert rerun.keys() == expected.keys()
    assert len(expected) == ITERATIONS * 16
    assert {identity: t["seed"] for identity, t in rerun.items()} == {i: t["seed"] for i, t in expected.items()}
    differing = [i for i, t in expected.items() if t["response_ids"] != rerun[i]["response_ids"]]
    record_property("trajectories_that_differ", f"{len(differing)} of {len(expected)}")
    print(f"Live rerun over {serving['replica']}: {len(differing)} of {len(expected)} trajectories differ in a token.")


def _recorded(run_folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Recorded trajectories by group and sample; the group's name holds iteration, position and row."""
    found = {}
    for path in (run_folder / "recording").glob("iteration_*.jsonl.gz"):
        with gzip.open(path, "rt") as file:
            for line in file:
                trajectory = json.loads(line)
                found[trajectory["group_id"], trajectory["sample_index"]] = trajectory
    return found
