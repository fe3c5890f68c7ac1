from __future__ import annotations

import errno
import os
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch

from lit_rl.callbacks.checkpoint import IterationCheckpoint, StreamingCheckpointIO
from lit_rl.callbacks.validate_first import ValidateFirst


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def _last(folder: Path) -> str:
    return (folder / "checkpoints/last.ckpt").resolve().name


class FailingDisk(StreamingCheckpointIO):
    """Runs full in the middle of the given save."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.saves = 0

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        self.saves += 1
        if self.saves == self.fails_at:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        super().save_checkpoint(checkpoint, path, storage_options)


def test_the_newest_iteration_is_kept_and_last_points_to_it(train, tmp_path) -> None:
    train(IterationCheckpoint(), iterations=3)

    assert _names(tmp_path) == ["iteration_00002.ckpt", "last.ckpt"]
    assert _last(tmp_path) == "iteration_00002.ckpt"


def test_keep_counts_the_newest(train, tmp_path) -> None:
    train(IterationCheckpoint(keep=2), iterations=4)

    assert _names(tmp_path) == ["iteration_00002.ckpt", "iteration_00003.ckpt", "last.ckpt"]


def test_the_last_iteration_is_saved_whatever_the_interval(train, tmp_path) -> None:
    train(IterationCheckpoint(every_n_iterations=2, keep=-1), iterations=5)

    assert _names(tmp_path) == ["iteration_00001.ckpt", "iteration_00003.ckpt", "iteration_00004.ckpt", "last.ckpt"]


def test_an_iteration_without_an_optimizer_step_is_saved_too(train, tmp_path, make_module) -> None:
    # Its rows are used up all the same; Lightning's own callback goes by the optimizer steps and would skip it.
    train(IterationCheckpoint(), iterations=2, module=make_module(learns=False))

    assert _last(tmp_path) == "iteration_00001.ckpt"


def test_a_save_that_fails_half_way_leaves_the_last_good_one(train, tmp_path) -> None:
    # Case O39.
    with pytest.raises(RuntimeError) as failed:
        train(IterationCheckpoint(), iterations=3, plugins=[FailingDisk(fails_at=2)])

    assert _names(tmp_path) == ["iteration_00000.ckpt", "last.ckpt"]
    assert _last(tmp_path) == "iteration_00000.ckpt"
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 0
    message = str(failed.value)
    assert "iteration_00001.ckpt" in message
    assert "No space left on device" in message
    assert f"The last good checkpoint is intact: {tmp_path}/checkpoints/iteration_00000.ckpt" in message


def test_what_an_earlier_process_left_is_swept_up_after_a_good_save(train, tmp_path) -> None:
    # Case O39: retention goes by the disk, also after a resume.
    train(IterationCheckpoint(), iterations=2)
    (tmp_path / "checkpoints/iteration_00007.ckpt.partial").write_bytes(b"half")

    train(IterationCheckpoint(), iterations=3, ckpt_path=str(tmp_path / "checkpoints/last.ckpt"))

    assert _names(tmp_path) == ["iteration_00002.ckpt", "last.ckpt"]


def test_the_file_appears_under_its_name_only_when_it_is_complete(train, tmp_path, monkeypatch) -> None:
    seen: list[tuple[bool, bool]] = []
    real_save = torch.save

    def watch(content, file, *args, **kwargs) -> None:
        real_save(content, file, *args, **kwargs)
        folder = tmp_path / "checkpoints"
        seen.append(((folder / "iteration_00000.ckpt").exists(), (folder / "iteration_00000.ckpt.partial").exists()))

    monkeypatch.setattr(torch, "save", watch)
    train(IterationCheckpoint(), iterations=1)

    assert seen == [(False, True)]


def test_an_exception_inside_an_iteration_keeps_the_boundary_before_it(train, tmp_path) -> None:
    class FailsInTheSecondIteration(L.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        train(IterationCheckpoint(), FailsInTheSecondIteration())

    assert _last(tmp_path) == "iteration_00000.ckpt"


def test_a_run_stopped_inside_an_iteration_does_not_save_it(train, tmp_path) -> None:
    class StopsAfterTheFirstBatchOfTheSecondIteration(L.Callback):
        def on_train_batch_end(self, trainer, *args) -> None:
            trainer.should_stop = trainer.current_epoch == 1

    train(IterationCheckpoint(), StopsAfterTheFirstBatchOfTheSecondIteration())

    assert _last(tmp_path) == "iteration_00000.ckpt"


def test_the_best_by_validation_is_kept_beside_the_newest(train, tmp_path, make_module) -> None:
    best = IterationCheckpoint(monitor="val-core/sums/reward/mean@1")
    train(best, IterationCheckpoint(), iterations=4, module=make_module(scores=[0.1, 0.9, 0.3, 0.2]))

    assert _names(tmp_path) == ["best_iteration_00001.ckpt", "iteration_00003.ckpt", "last.ckpt"]
    assert float(best.best_model_score) == pytest.approx(0.9)


def test_an_iteration_without_a_validation_is_not_judged_by_an_earlier_score(train, tmp_path, make_module) -> None:
    scores = [0.0, 0.9, 0.0, 0.5]
    train(
        IterationCheckpoint(monitor="val-core/sums/reward/mean@1", keep=-1),
        iterations=4,
        validate_every=2,
        module=make_module(scores=scores),
    )

    assert _names(tmp_path) == ["best_iteration_00001.ckpt", "best_iteration_00003.ckpt"]


def test_the_validation_before_training_is_no_score_of_the_first_iteration(train, tmp_path) -> None:
    best = IterationCheckpoint(monitor="val-core/sums/reward/mean@1", keep=-1)
    train(ValidateFirst(), best, iterations=2, validate_every=2)

    assert _names(tmp_path) == ["best_iteration_00001.ckpt"]


def test_a_resumed_run_remembers_the_best_score(train, tmp_path, make_module) -> None:
    def best() -> IterationCheckpoint:
        return IterationCheckpoint(monitor="val-core/sums/reward/mean@1")

    scores = [0.9, 0.1, 0.5]
    train(best(), IterationCheckpoint(), iterations=2, module=make_module(scores=scores))
    train(
        best(),
        IterationCheckpoint(),
        iterations=3,
        module=make_module(scores=scores),
        ckpt_path=str(tmp_path / "checkpoints/last.ckpt"),
    )

    assert _names(tmp_path) == ["best_iteration_00000.ckpt", "iteration_00002.ckpt", "last.ckpt"]


def test_checkpoints_load_in_torchs_strict_mode(train, tmp_path) -> None:
    train(IterationCheckpoint(), IterationCheckpoint(monitor="val-core/sums/reward/mean@1"), iterations=1)

    for path in (tmp_path / "checkpoints").iterdir():
        assert torch.load(path, weights_only=True)["epoch"] == 0


def test_a_written_checkpoint_loads_and_leaves_nothing_beside_it(tmp_path) -> None:
    content = {"weight": torch.ones(1000)}
    target = tmp_path / "a.ckpt"

    StreamingCheckpointIO().save_checkpoint(content, target)

    torch.testing.assert_close(torch.load(target)["weight"], content["weight"])
    assert os.listdir(tmp_path) == ["a.ckpt"]


@pytest.mark.parametrize(
    "options", [{"every_n_train_steps": 5}, {"train_time_interval": timedelta(minutes=1)}], ids=["steps", "time"]
)
def test_saving_inside_an_iteration_is_refused(options) -> None:
    with pytest.raises(ValueError, match="Use every_n_iterations"):
        IterationCheckpoint(**options)


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -2}, {"every_n_iterations": 0}])
def test_numbers_out_of_range_are_refused(options) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        IterationCheckpoint(**options)
