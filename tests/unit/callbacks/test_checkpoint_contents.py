"""What an iteration checkpoint holds beside the weights, and that a resume takes it up or refuses it."""

from __future__ import annotations

import random

import lightning as L
import numpy as np
import pytest
import torch

from lit_rl.callbacks.checkpoint import IterationCheckpoint


class Draws(L.Callback):
    """User code that draws from every global generator."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float, float]] = []

    def on_train_batch_start(self, *args) -> None:
        # The normal numbers keep a second one back, which is a part of the state.
        self.drawn.append((random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))))


def _last(tmp_path) -> str:
    return str(tmp_path / "checkpoints/last.ckpt")


def test_a_resumed_run_draws_what_the_uninterrupted_one_drew(train, tmp_path) -> None:  # O38: random state continues
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    whole = Draws()
    train(whole, IterationCheckpoint(keep=-1), iterations=4)

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(8)  # another process has drawn other numbers
    resumed = Draws()
    train(resumed, IterationCheckpoint(), iterations=4, ckpt_path=str(tmp_path / "checkpoints/iteration_00001.ckpt"))

    assert len(whole.drawn) == 8
    assert resumed.drawn == whole.drawn[4:]


def test_what_is_drawn_while_a_run_starts_does_not_count(train, tmp_path) -> None:
    class DrawsAtTheStart(L.Callback):
        def on_fit_start(self, *args) -> None:
            random.random()
            torch.rand(1)

    whole = Draws()
    train(whole, IterationCheckpoint(keep=-1), iterations=2)
    resumed = Draws()
    first = str(tmp_path / "checkpoints/iteration_00000.ckpt")
    train(DrawsAtTheStart(), resumed, IterationCheckpoint(), iterations=2, ckpt_path=first)

    assert resumed.drawn == whole.drawn[2:]


def test_a_checkpoint_with_random_states_of_fewer_ranks_leaves_the_others_their_own(train, tmp_path) -> None:
    train(IterationCheckpoint(), iterations=1)
    checkpoint = torch.load(_last(tmp_path), weights_only=True)
    assert len(checkpoint["lit_rl_random_states"]) == 1

    checkpoint["lit_rl_random_states"] = []
    torch.save(checkpoint, tmp_path / "fewer.ckpt")
    random.seed(3)
    expected, _ = random.random(), random.seed(3)
    draws = []

    class DrawOnce(L.Callback):
        def on_train_epoch_start(self, *args) -> None:
            draws.append(random.random())

    train(DrawOnce(), IterationCheckpoint(), iterations=2, ckpt_path=str(tmp_path / "fewer.ckpt"))

    assert draws == [expected]


def test_a_place_in_the_rows_that_another_class_wrote_is_not_lost_silently(train, tmp_path, make_data) -> None:
    class WithPlace(make_data):
        def state_dict(self):
            return {"cursor": {"position": 3}}

    class Renamed(WithPlace):
        pass

    train(IterationCheckpoint(), iterations=1, data=WithPlace())

    with pytest.raises(ValueError, match=r"no place in the training rows for .*Renamed; it has one for .*WithPlace"):
        train(IterationCheckpoint(), iterations=2, data=Renamed(), ckpt_path=_last(tmp_path))
    train(IterationCheckpoint(), iterations=2, data=WithPlace(), ckpt_path=_last(tmp_path))


def test_going_back_removes_nothing_that_is_newer_and_keeps_what_is_saved(train, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    train(IterationCheckpoint(keep=-1), iterations=4)

    # A person goes back to iteration 0 in the same folder; what iterations 2 and 3 were is not this run's to remove.
    train(IterationCheckpoint(keep=1), iterations=2, ckpt_path=str(folder / "iteration_00000.ckpt"))

    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration_00001.ckpt",
        "iteration_00002.ckpt",
        "iteration_00003.ckpt",
        "last.ckpt",
    ]
    assert (folder / "last.ckpt").resolve().name == "iteration_00001.ckpt"


def test_a_new_run_in_a_used_folder_keeps_its_own_newest(train, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    train(IterationCheckpoint(), iterations=5)

    train(IterationCheckpoint(), iterations=2)

    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration_00001.ckpt",
        "iteration_00004.ckpt",
        "last.ckpt",
    ]
    assert (folder / "last.ckpt").resolve().name == "iteration_00001.ckpt"


def test_a_sanity_check_is_no_score_to_save_by(train, tmp_path) -> None:  # O46
    best = IterationCheckpoint(monitor="val-core/sums/reward/mean@1")
    train(best, iterations=2, validate_every=10, num_sanity_val_steps=2)

    assert best.best_k_models == {}
    assert list((tmp_path / "checkpoints").glob("*")) == []
