"""Saving before a rented machine goes away (contracts 10.9)."""

from __future__ import annotations

import time

import lightning as L
import pytest

from lit_rl.callbacks.checkpoint import IterationCheckpoint
from lit_rl.callbacks.instance_expiry import expires_soon

VOLCANO = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
SAGEMAKER = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
NOW = 1_000_000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    for name in (VOLCANO, SAGEMAKER):
        monkeypatch.delenv(name, raising=False)


# The longest iteration took 100 s, and 60 s are for saving: 160 s, and 190 s with a margin of 30 s.
@pytest.mark.parametrize("name", [VOLCANO, SAGEMAKER])
@pytest.mark.parametrize(
    ("remaining_s", "margin_s", "soon"), [(161, 0, False), (159, 0, True), (189, 30, True), (191, 30, False)]
)
def test_a_machine_ends_soon_if_no_further_iteration_and_save_fit(name, remaining_s, margin_s, soon, monkeypatch):
    monkeypatch.setenv(name, str(int(NOW + remaining_s)))

    assert expires_soon(100.0, margin_s) is soon


def test_without_an_announced_end_nothing_ends_soon() -> None:
    assert not expires_soon(1e9)


def test_an_end_that_has_passed_counts_only_where_it_is_not_left_in_place(monkeypatch) -> None:
    monkeypatch.setenv(SAGEMAKER, str(NOW - 5))
    assert expires_soon(100.0)

    monkeypatch.setenv(VOLCANO, str(NOW - 5))
    assert not expires_soon(100.0)


@pytest.mark.parametrize("value", ["tomorrow", "nan"])
def test_an_end_that_is_no_time_is_ignored_with_a_warning(value, monkeypatch, caplog) -> None:
    monkeypatch.setenv(SAGEMAKER, value)

    assert not expires_soon(100.0)
    assert f"{SAGEMAKER}='{value}' is no time" in caplog.text


def _saved(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").glob("iteration_*"))


def test_an_iteration_is_saved_out_of_turn_when_the_machine_ends_soon(train, tmp_path, monkeypatch, caplog) -> None:
    # Iterations take milliseconds; 60 s are for saving, and 40 s are kept free.
    class AnnouncesTheEnd(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module) -> None:
            monkeypatch.setenv(SAGEMAKER, str(NOW + (99 if trainer.current_epoch == 1 else 1000)))

    checkpoint = IterationCheckpoint(every_n_iterations=10, keep=-1, expiry_margin_s=40.0)
    train(AnnouncesTheEnd(), checkpoint, iterations=4)

    assert _saved(tmp_path) == ["iteration_00001.ckpt", "iteration_00003.ckpt"]
    assert "Iteration 1 is saved out of turn" in caplog.text


@pytest.mark.parametrize("margin_s", [-1.0, float("nan")])
def test_a_margin_below_zero_is_refused(margin_s) -> None:
    with pytest.raises(ValueError, match=r"expiry_margin_s=.* must be at least 0"):
        IterationCheckpoint(expiry_margin_s=margin_s)
