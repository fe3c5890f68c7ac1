"""Kill -9 at every moment of an iteration, then resume: the run equals one that was never interrupted (O38, O39)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from killed_fit import ITERATIONS, LOG, survivor
from tiny_fit import TinyFit

from lit_rl.run_folder import last_checkpoint

pytestmark = pytest.mark.usefixtures("nothing_left")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """What every iteration of the whole run learnt from, and its weights at the end."""
    folder = tmp_path_factory.mktemp("whole")
    run = survivor(folder).fit()
    return _trained(folder), run.weights()


def _trained(folder: Path) -> list[list[dict[str, Any]]]:
    """Trajectories by iteration that the last checkpoint comes from: a later line of an iteration replaces an earlier
    one, and with it what came after."""
    lineage: list[list[dict[str, Any]]] = []
    for line in (folder / LOG).read_text().splitlines():
        entry = json.loads(line)
        assert entry["iteration"] <= len(lineage)
        lineage[entry["iteration"] :] = [entry["trained"]]
    return lineage


def _identities(trained: list[list[dict[str, Any]]]) -> list[list[tuple[str, int, int]]]:
    return [[(t["row"], t["sample"], t["seed"]) for t in iteration] for iteration in trained]


def _run_until_killed(folder: Path, moment: str, at: int) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from killed_fit import main; main()", str(folder), moment, str(at)],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr


def _path() -> str:
    return os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])


# The first pass over the rows ends with iteration 4. Killed in iteration 5, a run resumes at the pass's end.
@pytest.mark.parametrize(
    ("moment", "at", "kept"),
    [
        pytest.param("rollout", 5, 4, marks=pytest.mark.slow),
        pytest.param("scoring", 3, 2, marks=pytest.mark.slow),
        pytest.param("update", 3, 2),
        pytest.param("sync", 5, 4, marks=pytest.mark.slow),
        pytest.param("save", 3, 2),
        # The new checkpoint has its name, and last.ckpt still points to the one before.
        pytest.param("link", 4, 3, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_in_an_iteration_is_resumed_as_if_it_had_not_been(
    moment, at, kept, tmp_path, uninterrupted, record_property
) -> None:
    trained, weights = uninterrupted
    assert len(trained) == ITERATIONS
    assert [len({t["row"] for t in iteration}) for iteration in trained] == [2] * ITERATIONS
    for one_pass in (trained[:5], trained[5:]):
        assert len({t["row"] for iteration in one_pass for t in iteration}) == 10

    _run_until_killed(tmp_path, moment, at)
    last = last_checkpoint(tmp_path)
    assert last is not None
    assert torch.load(last, weights_only=True)["epoch"] == kept
    resumed = survivor(tmp_path).fit(ckpt_path=str(last))

    assert len(resumed.iterations) == ITERATIONS - 1 - kept
    rerun = _trained(tmp_path)
    assert _identities(rerun) == _identities(trained)
    # The inline engine computes one sequence at a time, so a live rerun samples the same tokens, too.
    differing = _num_differing(rerun, trained)
    record_property("trajectories_that_differ", differing)
    assert differing == 0
    _assert_finished(resumed, weights, tmp_path)


def _num_differing(rerun: list[list[dict[str, Any]]], trained: list[list[dict[str, Any]]]) -> int:
    pairs = zip([t for i in rerun for t in i], [t for i in trained for t in i], strict=True)
    return sum(one["tokens"] != other["tokens"] for one, other in pairs)


def _assert_finished(run: TinyFit, weights: dict[str, Any], folder: Path) -> None:
    found = run.weights()
    assert [name for name in weights if not torch.equal(found[name], weights[name])] == []
    assert run.trainer.global_step == 2 * ITERATIONS
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == [f"iteration_{ITERATIONS - 1:05d}.ckpt", "last.ckpt"]  # O39: after a resume as well
