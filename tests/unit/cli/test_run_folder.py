from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from lit_rl.run_folder import create_run_folder, iteration_checkpoints, last_checkpoint, resolve_checkpoint

NOON = datetime(2026, 3, 4, 12, 0, 0)


def _checkpoint(run: Path, name: str, modified_at: int = 0) -> Path:
    path = run / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
    os.utime(path, (modified_at, modified_at))
    return path


def test_runs_started_in_the_same_second_get_different_folders(tmp_path) -> None:
    # Case O44.
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: create_run_folder(tmp_path, "sums", NOON), range(16)))

    assert len(set(folders)) == 16
    assert {folder.name for folder in folders} == {
        "2026-03-04_12-00-00",
        *(f"2026-03-04_12-00-00-{number}" for number in range(2, 17)),
    }


def test_a_runs_dir_that_cannot_be_written_is_named(fit, capsys, tmp_path) -> None:
    (tmp_path / "taken").write_text("a file")

    for runs_dir, reason in ((tmp_path / "taken", "Not a directory"), (Path("/proc/runs"), "No such file")):
        with pytest.raises(SystemExit) as stopped:
            fit("--data=cli_standin.Data", f"--runs_dir={runs_dir}")
        message = capsys.readouterr().err
        assert stopped.value.code == 2
        assert f"lit-rl: error: runs_dir={runs_dir}: cannot make a folder in {runs_dir}/recipe ({reason}" in message


def test_a_half_written_checkpoint_is_ignored(tmp_path) -> None:
    # Case O39.
    good = _checkpoint(tmp_path, "iteration_00001.ckpt")
    _checkpoint(tmp_path, "iteration_00002.ckpt.partial")

    assert last_checkpoint(tmp_path) == good
    assert iteration_checkpoints(good.parent) == [good]


def test_checkpoints_are_ordered_by_iteration_not_by_name(tmp_path) -> None:
    later, earlier = _checkpoint(tmp_path, "iteration_100000.ckpt"), _checkpoint(tmp_path, "iteration_99999.ckpt")

    assert iteration_checkpoints(later.parent) == [earlier, later]


def test_last_is_the_newest_checkpoint_of_all_runs_of_the_name(tmp_path) -> None:
    _checkpoint(tmp_path / "sums" / "b", "iteration_00009.ckpt", modified_at=100)
    newest = _checkpoint(tmp_path / "sums" / "a", "iteration_00003.ckpt", modified_at=200)
    _checkpoint(tmp_path / "other" / "a", "iteration_00003.ckpt", modified_at=300)
    (tmp_path / "sums" / "c").mkdir()

    assert resolve_checkpoint("last", tmp_path, "sums") == str(newest)


def test_last_without_any_checkpoint_starts_from_scratch_unless_one_is_required(tmp_path) -> None:
    assert resolve_checkpoint("last", tmp_path, "sums") is None
    with pytest.raises(FileNotFoundError, match="ckpt_path=last: no run below .*sums has a checkpoint"):
        resolve_checkpoint("last", tmp_path, "sums", required=True)


def test_a_run_folder_or_checkpoint_folder_means_its_last_checkpoint(tmp_path) -> None:
    newest = _checkpoint(tmp_path, "iteration_00003.ckpt")

    assert resolve_checkpoint(str(tmp_path), "runs", "x") == str(newest)
    assert resolve_checkpoint(str(newest.parent), "runs", "x") == str(newest)
    assert resolve_checkpoint(str(newest), "runs", "x") == str(newest)


def test_a_sharded_checkpoint_folder_is_itself_the_checkpoint(tmp_path) -> None:
    (tmp_path / "meta.pt").touch()

    assert resolve_checkpoint(str(tmp_path), "runs", "x") == str(tmp_path)


def test_a_missing_or_empty_checkpoint_path_is_an_error_that_names_it(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="ckpt_path=.*nowhere: no such file"):
        resolve_checkpoint(str(tmp_path / "nowhere"), "runs", "x")
    with pytest.raises(FileNotFoundError, match="holds no complete checkpoint"):
        resolve_checkpoint(str(tmp_path), "runs", "x")
