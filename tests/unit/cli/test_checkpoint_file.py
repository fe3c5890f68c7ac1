from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lit_rl.checkpoint_file import checkpoint_problem


@pytest.fixture
def run_folder(fit, capsys) -> Path:
    """A run with two complete checkpoints."""
    run = fit("--trainer.callbacks+=lit_rl.callbacks.IterationCheckpoint", "--trainer.callbacks.keep=2").run_folder
    capsys.readouterr()
    return run


def _cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _made_empty(file: Path) -> None:
    file.write_bytes(b"")


def _of_another_program(file: Path) -> None:
    torch.save({"model": {"weight": torch.zeros(2)}}, file)


def _with_a_damaged_index(file: Path) -> None:
    torch.save({}, file)
    file.write_bytes(file.read_bytes().replace(b"data.pkl", b"fata.pkl"))


def _weights_only(file: Path) -> None:
    content = torch.load(file, weights_only=False)
    torch.save({key: content[key] for key in ("state_dict", "lit_rl_policy_version")}, file)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_cut_short, "is cut short, or no checkpoint at all"),
        (_made_empty, "the file (0 bytes) is cut short"),
        (_of_another_program, "no checkpoint that lit-rl has written (without state_dict, lit_rl_policy_version)"),
        (_with_a_damaged_index, "the file cannot be read"),
        (_weights_only, "it holds weights only (without optimizer_states, loops, epoch)"),
    ],
)
@pytest.mark.parametrize("way", ["the file", "the run folder"])
def test_a_checkpoint_that_cannot_be_resumed_is_refused_before_anything_is_built(
    fit, capsys, run_folder, damage: Callable[[Path], None], problem, way
) -> None:
    newest = run_folder / "checkpoints/iteration_00001.ckpt"
    damage(newest)
    given = newest if way == "the file" else run_folder

    with pytest.raises(SystemExit) as stopped:
        fit("--data=cli_standin.NeedsEngine", f"--ckpt_path={given}")

    message = capsys.readouterr().err
    assert stopped.value.code == 2
    assert problem in message
    assert f"--ckpt_path {run_folder}/checkpoints/iteration_00000.ckpt" in message
    assert len(message.strip().splitlines()) <= 2


def test_a_half_written_checkpoint_is_refused_by_its_name(fit, capsys, run_folder) -> None:
    newest = run_folder / "checkpoints/iteration_00001.ckpt"
    partial = newest.rename(newest.with_name("iteration_00001.ckpt.partial"))

    with pytest.raises(SystemExit):
        fit("--data=cli_standin.NeedsEngine", f"--ckpt_path={partial}", subcommand="test")

    assert "cut short. The newest complete checkpoint of that run: --ckpt_path" in capsys.readouterr().err


def test_a_file_alone_has_no_run_to_go_back_to(fit, capsys, run_folder, tmp_path) -> None:
    alone = tmp_path / "alone.ckpt"
    alone.write_text("not a checkpoint")

    with pytest.raises(SystemExit):
        fit("--data=cli_standin.NeedsEngine", f"--ckpt_path={alone}")

    assert f"ckpt_path={alone}: " in (message := capsys.readouterr().err)
    assert "No other complete checkpoint lies beside it" in message


def test_weights_alone_are_enough_to_validate(run_folder, tmp_path) -> None:
    copied = Path(shutil.copy(run_folder / "checkpoints/iteration_00001.ckpt", tmp_path / "weights.ckpt"))
    _weights_only(copied)

    assert checkpoint_problem(copied, resumes=False) is None
    assert checkpoint_problem(copied, resumes=True) is not None
