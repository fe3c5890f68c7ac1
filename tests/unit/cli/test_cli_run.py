from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest
import torch
import yaml
from cli_standin import BaseModule, Data, StandInCLI

from lit_rl.callbacks import IterationCheckpoint, RewardPlot, RLProgress, TrajectoryLog
from lit_rl.cli import _terminate, build_from_config


def _rows(run_folder: Path) -> list[dict[str, str]]:
    with (run_folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_everything_in_a_folder_of_its_own(fit, capsys) -> None:
    cli = fit()

    folder = cli.run_folder
    assert folder.parent == Path("runs/recipe")
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert left == {
        "config.yaml",
        "metrics.csv",
        "reward.png",
        "checkpoints/iteration_00001.ckpt",
        "checkpoints/last.ckpt",
        "trajectories/iteration_00000.jsonl",
        "trajectories/iteration_00001.jsonl",
        "trajectories/validation_00001.jsonl",
        "trajectories/validation_00002.jsonl",
    }
    assert (folder / "checkpoints/last.ckpt").resolve().name == "iteration_00001.ckpt"
    assert capsys.readouterr().out.splitlines()[-1].endswith(str(folder))


def test_the_iteration_is_the_x_axis(fit) -> None:
    # Case O45: iterations of two mini-batches each.
    cli = fit("--trainer.max_epochs=3", "--trainer.check_val_every_n_epoch=2")

    rows = _rows(cli.run_folder)
    assert cli.trainer.global_step == 6
    assert [row["iteration"] for row in rows[:3]] == ["0.0", "1.0", "2.0"]
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert [row["val-core/sums/reward/mean@1"] for row in rows] == ["", "", "0.2"]


def test_the_same_command_twice_gives_two_runs_and_each_saved_config_gives_its_run_again(fit) -> None:
    # Case O44.
    first, second = fit("--model.hidden=5"), fit("--model.hidden=6")
    assert first.run_folder != second.run_folder

    again = fit(config=str(first.run_folder / "config.yaml"))

    before, after = (dict(yaml.safe_load((run.run_folder / "config.yaml").read_text())) for run in (first, again))
    assert before == after
    assert again.model.hidden == 5
    assert again.run_folder.parent == first.run_folder.parent


def test_a_resumed_run_trains_on_what_the_uninterrupted_one_would(fit) -> None:
    whole = fit("--trainer.max_epochs=4")
    assert whole.model.seen == [0, 1, 2, 3, 4, 5, 6, 7]

    fit("--trainer.max_epochs=2", "--run_name=parts")
    resumed = fit("--trainer.max_epochs=4", "--run_name=parts", "--ckpt_path=last")

    assert resumed.model.seen == [4, 5, 6, 7]
    torch.testing.assert_close(resumed.model.weight.weight, whole.model.weight.weight)


def test_a_checkpoint_does_not_bring_its_hyper_parameters(fit) -> None:
    first = fit("--model.hidden=5", "--trainer.max_epochs=1")
    resumed = fit("--model.hidden=6", f"--ckpt_path={first.run_folder}")

    assert resumed.model.hidden == 6
    assert resumed.trainer.current_epoch == 2


def test_a_failing_iteration_leaves_the_boundary_before_it_and_the_command_to_resume(fit, capsys) -> None:
    with pytest.raises(RuntimeError, match="the step failed"):
        fit("--model.fails_at=1")

    run = next(Path("runs/recipe").iterdir())
    message = capsys.readouterr().err
    assert [path.name for path in (run / "checkpoints").glob("iteration*")] == ["iteration_00000.ckpt"]
    assert f"lit-rl fit --config {run}/config.yaml --ckpt_path {run}/checkpoints/last.ckpt" in message


def test_ctrl_c_exits_with_130_and_says_how_to_resume(fit, capsys) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as stopped:
            fit("--model=cli_standin.InterruptedModule", "--model.fails_at=1")
    finally:
        signal.signal(signal.SIGINT, handler)

    message = capsys.readouterr().err
    assert stopped.value.code == 130
    assert "Interrupted; iteration_00000.ckpt is kept. Resume with: lit-rl fit" in message


def test_ctrl_c_in_the_first_iteration_says_that_there_is_nothing_to_resume(fit, capsys) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit("--model=cli_standin.InterruptedModule", "--model.fails_at=0")
    finally:
        signal.signal(signal.SIGINT, handler)

    assert "Interrupted; no iteration was saved" in capsys.readouterr().err


def test_sigterm_stops_at_once_and_keeps_the_last_boundary(fit, capsys) -> None:
    handler = signal.signal(signal.SIGTERM, _terminate)
    try:
        with pytest.raises(SystemExit) as stopped:
            fit("--model=cli_standin.TerminatedModule", "--model.fails_at=1")
    finally:
        signal.signal(signal.SIGTERM, handler)

    assert stopped.value.code == 143
    assert "Terminated; iteration_00000.ckpt is kept" in capsys.readouterr().err


def test_a_sanity_check_leaves_no_trace(fit) -> None:
    # Case O46.
    without, with_check = fit("--trainer.num_sanity_val_steps=0"), fit("--trainer.num_sanity_val_steps=2")

    assert with_check.model.seen == without.model.seen
    assert _rows(with_check.run_folder) == _rows(without.run_folder)
    files = [
        {str(path.relative_to(run.run_folder)) for path in run.run_folder.rglob("*")} for run in (without, with_check)
    ]
    assert files[0] == files[1]


def test_validate_test_and_predict_write_their_trajectories_and_say_where(fit, capsys) -> None:
    trained = fit()
    capsys.readouterr()
    validated = fit(f"--ckpt_path={trained.run_folder}", subcommand="validate")
    tested = fit(subcommand="test")
    predicted = fit(subcommand="predict")

    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Done: ")]
    assert said == [
        f"Done: 1 sampled trajectories are in {validated.run_folder}/trajectories/validation.jsonl",
        f"Done: 1 sampled trajectories are in {tested.run_folder}/trajectories/test.jsonl",
        f"Done: 1 predictions are in {predicted.run_folder}/trajectories/predict.jsonl",
    ]

    lines = (validated.run_folder / "trajectories/validation.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["row_id"] == "row9"
    assert (tested.run_folder / "trajectories/test.jsonl").exists()
    torch.testing.assert_close(validated.model.weight.weight, trained.model.weight.weight)


def _kinds(cli: StandInCLI) -> list[str]:
    return [type(callback).__name__ for callback in cli.trainer.callbacks]


def test_default_callbacks_are_added_once_and_checkpoints_come_last(parse) -> None:
    names = _kinds(parse())

    for expected in (TrajectoryLog, RewardPlot, RLProgress, IterationCheckpoint):
        assert names.count(expected.__name__) == 1
    assert names[-1] == "IterationCheckpoint"


def test_the_users_callback_takes_the_place_of_the_default_one(parse) -> None:
    cli = parse("--trainer.callbacks+=lit_rl.callbacks.TrajectoryLog", "--trainer.callbacks.max_per_iteration=7")

    logs = [callback for callback in cli.trainer.callbacks if isinstance(callback, TrajectoryLog)]
    assert [log.max_per_iteration for log in logs] == [7]


def test_keeping_the_best_goes_beside_keeping_the_last(parse) -> None:
    cli = parse("--trainer.callbacks+=lit_rl.callbacks.IterationCheckpoint", "--trainer.callbacks.monitor=reward")

    checkpoints = [callback for callback in cli.trainer.callbacks if isinstance(callback, IterationCheckpoint)]
    assert {callback.monitor for callback in checkpoints} == {None, "reward"}


def test_default_callbacks_can_be_switched_off(parse) -> None:
    names = _kinds(parse("--default_callbacks=false", "--trainer.enable_checkpointing=false"))

    assert "RLProgress" not in names
    assert "IterationCheckpoint" not in names


def test_a_checkpoint_callback_that_saves_anywhere_is_refused(parse, capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--trainer.callbacks+=cli_standin.BadCheckpoint")

    assert "Use lit_rl.callbacks.IterationCheckpoint" in capsys.readouterr().err


def test_the_metrics_file_stays_beside_the_users_loggers(parse) -> None:
    cli = parse("--trainer.logger=lightning.pytorch.loggers.TensorBoardLogger", "--trainer.logger.save_dir=boards")

    names = [type(logger).__name__ for logger in cli.trainer.loggers]
    assert names == ["MetricsFileLogger", "TensorBoardLogger"]
    assert [type(logger).__name__ for logger in parse("--trainer.logger=false").trainer.loggers] == [
        "MetricsFileLogger"
    ]


def test_a_saved_config_builds_the_same_objects_without_running(fit) -> None:
    run = fit("--model.hidden=5")

    built = build_from_config(
        run.run_folder / "config.yaml", ["--model.lr=0.5"], model_class=BaseModule, datamodule_class=Data
    )

    assert (built.model.hidden, built.model.lr, built.datamodule.group_size) == (5, 0.5, 3)
    assert built.trainer.max_epochs == 2
    assert built.run_folder.parent == Path("runs/recipe")


def test_wandb_gets_the_whole_config_nested_and_once(fit, monkeypatch) -> None:
    # Case O44; offline, nothing leaves the machine.
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb")

    cli = fit(
        "--trainer.logger=lightning.pytorch.loggers.WandbLogger", "--trainer.logger.project=test", "--model.lr=1e-6"
    )

    config = dict(cli.trainer.loggers[1].experiment.config)
    wandb.finish()
    assert [path.parent for path in Path().rglob("offline-run-*")] == [cli.run_folder / "wandb"]
    assert config["model"]["init_args"]["lr"] == 1e-6
    assert config["model"]["init_args"]["model_name"] == "some/model"
    assert config["data"]["init_args"]["sampling"] == {"temperature": 0.5, "stop": []}
    assert config["trainer"]["max_epochs"] == 2
    assert not any("/" in key or "." in key for key in config)


@pytest.mark.parametrize("form", [["--verbose"], ["--verbose=true"], ["--verbose", "true"]])
def test_verbose_is_a_flag_and_an_option(parse, form) -> None:
    assert parse(*form).datamodule.verbose is True
