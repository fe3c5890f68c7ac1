"""The command line on two ranks: one rollout, two shares, one set of files, and nothing left when a rank ends."""

from __future__ import annotations

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tagged_run import TaggedRun, the_run_folder, write_recipe

WEIGHT = "actor.network.model.embed_tokens.weight"
TWO_RANKS = {"trainer__strategy": "ddp", "trainer__devices": 2, "data__init_args__num_mini_batches": 2}


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def trajectories_of(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"trajectories/{name}.jsonl").read_text().splitlines()]


def test_two_ddp_ranks_learn_what_one_does(lit_rl, tmp_path: Path) -> None:
    options = {"data__init_args__num_mini_batches": 1, "trainer__max_epochs": 2}
    both = lit_rl("fit", "--config", write_recipe(tmp_path, "both.yaml", **(TWO_RANKS | options)))
    assert both.wait(240) == 0, both.stderr
    alone = lit_rl("fit", "--config", write_recipe(tmp_path, "alone.yaml", **options))
    assert alone.wait(240) == 0, alone.stderr

    runs = [the_run_folder(tmp_path, name) for name in ("both", "alone")]
    found, expected = ([path.relative_to(run) for path in sorted(run.rglob("*"))] for run in runs)
    assert found == expected
    weights = [torch.load(run / "checkpoints/last.ckpt")["state_dict"][WEIGHT] for run in runs]
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)
    for left, right in zip(*(rows_of(run) for run in runs), strict=True):
        assert left.keys() >= right.keys()
        for name in ("critic/score/mean", "actor/grad_norm", "val-core/arithmetic/reward/mean@1", "iteration"):
            if right.get(name):
                assert float(left[name]) == pytest.approx(float(right[name]), rel=1e-4), name
    for name in ("iteration_00001", "validation_00002"):
        left, right = (trajectories_of(run, name) for run in runs)
        assert [line["output"] for line in left] == [line["output"] for line in right]
    assert both.stdout.count("Done: 2 iterations") == 1
    assert both.left_over(10.0) == []


def test_an_error_of_rank_0_ends_both_ranks_and_is_the_one_that_is_told(lit_rl, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def compute_score(solution_str, ground_truth):\n    raise OSError('no scale')\n"
    )
    recipe = write_recipe(
        tmp_path,
        **TWO_RANKS,
        data__init_args__val_data=None,
        data__init_args__rewards={"function": str(tmp_path / "broken.py"), "num_workers": 1},
    )
    run = lit_rl("fit", "--config", recipe)

    assert run.wait(240) != 0
    assert "OSError: no scale" in run.stderr
    assert run.left_over(90.0) == []
    assert "Rank 0 ended while rank 1 waited for iteration 0: its own error says why" in run.stderr


@pytest.mark.parametrize(
    "strategy",
    [
        {"class_path": "lit_rl.strategies.FSDP2Strategy"},
        pytest.param(
            {"class_path": "lit_rl.strategies.DeepSpeedStrategy", "init_args": {"stage": 3}}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda strategy: strategy["class_path"].rpartition(".")[2],
)
def test_shards_reach_the_replicas_whole_and_their_checkpoint_scores_as_it_did(lit_rl, tmp_path, strategy) -> None:
    if "DeepSpeed" in strategy["class_path"]:
        pytest.importorskip("deepspeed")
    recipe = write_recipe(tmp_path, **(TWO_RANKS | {"trainer__strategy": strategy}))
    fitted = lit_rl("fit", "--config", recipe)
    assert fitted.wait(240) == 0, fitted.stderr

    run = the_run_folder(tmp_path)
    rows = rows_of(run)
    # The engine holds the trainer's weights, version after version.
    assert max(float(row["rollout_corr/logprob_gap_max"]) for row in rows if row["iteration"]) < 1e-3
    assert {line["policy_version_min"] for line in trajectories_of(run, "iteration_00001")} == {1}
    assert fitted.left_over(10.0) == []

    if "DeepSpeed" in strategy["class_path"]:
        return  # its ZeRO-3 loads checkpoints for fit only
    scored = lit_rl("validate", "--config", str(run / "config.yaml"), "--ckpt_path", str(run))
    assert scored.wait(240) == 0, scored.stderr
    again = next(path for path in (tmp_path / "runs/tiny").iterdir() if path != run)
    expected, found = (trajectories_of(one, name) for one, name in ((run, "validation_00002"), (again, "validation")))
    assert [line["output"] for line in found] == [line["output"] for line in expected]


def test_two_ranks_over_ray_end_with_rank_0(lit_rl, tmp_path: Path) -> None:
    run = start_over_ray(lit_rl, tmp_path, trainer__max_epochs=1000)
    follower = rank_1(run)
    folder = the_run_folder(tmp_path)
    run.wait_for(lambda: len(list(folder.glob("trajectories/iteration_*.jsonl"))) > 1, 240, "two iterations")
    run.look()

    run.process.kill()
    run.process.wait(10)

    _, alive = psutil.wait_procs([follower], timeout=150)
    assert alive == [], run.stderr
    assert run.left_over(30.0) == []


@pytest.mark.slow
def test_rank_0_ends_with_rank_1(lit_rl, tmp_path: Path) -> None:
    run = start_over_ray(lit_rl, tmp_path, trainer__max_epochs=1000)
    follower = rank_1(run)
    folder = the_run_folder(tmp_path)
    run.wait_for(lambda: len(list(folder.glob("trajectories/iteration_*.jsonl"))) > 1, 240, "two iterations")
    run.look()

    follower.kill()

    assert run.process.wait(150) != 0
    assert run.left_over(30.0) == []


@pytest.mark.slow
def test_ctrl_c_stops_both_ranks_and_says_how_to_go_on(lit_rl, tmp_path: Path) -> None:
    run = start_over_ray(lit_rl, tmp_path, trainer__max_epochs=1000)
    run.wait_for(lambda: list((tmp_path / "runs/tiny").glob("*")), 240, "the run's folder")
    folder = the_run_folder(tmp_path)
    run.wait_for(lambda: len(list(folder.glob("checkpoints/iteration_*.ckpt"))) > 0, 240, "a checkpoint")
    run.look()

    os.killpg(run.process.pid, signal.SIGINT)

    assert run.wait(120) == 130, run.stderr
    assert "Interrupted" in run.stderr
    assert "Resume with: lit-rl fit" in run.stderr
    assert run.left_over(30.0) == []


def start_over_ray(lit_rl: Any, folder: Path, **changes: Any) -> TaggedRun:
    recipe = write_recipe(
        folder, **TWO_RANKS, data__init_args__backend="ray", data__init_args__num_cpus=2,
        data__init_args__val_data=None, **changes,
    )  # fmt: skip
    return lit_rl("fit", "--config", recipe)


def rank_1(run: TaggedRun) -> psutil.Process:
    """The process that Lightning has started for rank 1."""
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [
            child
            for child in psutil.Process(run.process.pid).children()
            if "lit_rl.cli" in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE
        ]
        return bool(found)

    run.wait_for(look, 240, "rank 1 to start")
    return found[0]
