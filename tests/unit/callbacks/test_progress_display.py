from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from lit_rl.callbacks.iteration_metrics import IterationMetrics, read_iteration
from lit_rl.callbacks.progress import RLProgress, iteration_line, live_line
from lit_rl.callbacks.validate_first import ValidateFirst
from lit_rl.experience.progress import PhaseProgress


def _trainer(phase: PhaseProgress, fn: str = "fit") -> SimpleNamespace:
    state = SimpleNamespace(fn=fn)
    return SimpleNamespace(
        state=state, current_epoch=2, max_epochs=30, datamodule=SimpleNamespace(phase=phase), is_global_zero=True
    )


def test_the_live_line_shows_iteration_phase_count_and_speed() -> None:
    phase = PhaseProgress()
    phase.start("rollout", total=64)
    phase.advance(37, tokens=4120)

    line = live_line(_trainer(phase), phase.started_at + 10.0).plain

    assert line == "iteration 2 (3 of 30)  rollout 37/64 trajectories  412 tok/s  10 s"


@pytest.mark.parametrize(
    ("name", "total", "expected"),
    [
        ("scoring", 0, "iteration 2 (3 of 30)  scoring  3 s"),
        ("update", 4, "iteration 2 (3 of 30)  update 0/4 mini-batches  3 s"),
        ("weight_sync", 0, "iteration 2 (3 of 30)  weight sync  3 s"),
    ],
)
def test_the_live_line_names_every_phase(name, total, expected) -> None:
    phase = PhaseProgress()
    phase.start(name, total=total)

    assert live_line(_trainer(phase), phase.started_at + 3.0).plain == expected


def test_the_live_line_does_not_count_past_the_last_iteration() -> None:
    trainer = _trainer(PhaseProgress())
    trainer.current_epoch = 30

    assert live_line(trainer, 0.0).plain == "iteration 29 (30 of 30)  waiting"


def test_outside_of_fit_the_live_line_has_no_iteration() -> None:
    phase = PhaseProgress()
    phase.start("validation", total=300)

    assert (
        live_line(_trainer(phase, fn="validate"), phase.started_at + 1.0).plain == "validation 0/300 trajectories  1 s"
    )


def test_the_line_of_an_iteration_has_reward_length_seconds_and_validation() -> None:
    metrics = IterationMetrics(
        iteration=3,
        reward=0.5,
        response_length=12.25,
        seconds={"rollout": 5.0, "update": 8.0, "sync": 0.5, "total": 14.0},
        validation_reward={"sums": 0.75},
    )

    assert iteration_line(metrics) == (
        "iteration    3  reward  0.500  response   12.2 tokens  "
        "14.0 s (rollout 5.0, update 8.0, sync 0.5)  validation 0.750"
    )


def test_several_data_sources_are_named() -> None:
    metrics = IterationMetrics(iteration=0, validation_reward={"a": 0.25, "b": 1.0})

    assert iteration_line(metrics) == "iteration    0  validation a 0.250, b 1.000"


def test_an_earlier_validation_is_not_shown_again() -> None:
    logged = {"critic/score/mean": torch.tensor(0.5), "val-core/a/reward/mean@1": torch.tensor(1.0)}

    assert read_iteration(4, logged, validated=False).validation_reward == {}
    assert read_iteration(4, logged, validated=True).validation_reward == {"a": 1.0}


def test_without_a_terminal_there_is_one_line_per_iteration(train, capsys) -> None:
    train(RLProgress(), iterations=4, validate_every=2)

    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "3"]
    assert ["validation" in line for line in lines] == [False, True, False, True]
    assert [float(line.split("reward")[1].split()[0]) for line in lines] == [0.0, 0.25, 0.5, 0.75]


def test_the_end_says_where_everything_is(train, tmp_path, capsys) -> None:
    train(RLProgress(), iterations=2)

    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Done: 2 iterations in 0 min")
    assert last.endswith(str(tmp_path))


def test_on_a_terminal_the_live_display_ends_with_the_run(train) -> None:
    progress = RLProgress()
    screen = io.StringIO()
    progress.console = Console(file=screen, force_terminal=True, width=120)

    train(progress, iterations=2)

    assert "iteration    1" in screen.getvalue()
    assert progress._live is None


def test_an_exception_gives_the_terminal_back(train, make_module) -> None:
    class Fails(make_module):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("no")

    progress = RLProgress()
    progress.console = Console(file=io.StringIO(), force_terminal=True)

    with pytest.raises(RuntimeError, match="no"):
        train(progress, module=Fails())

    assert progress._live is None


def test_a_validation_before_training_has_a_line_of_its_own(train, capsys) -> None:
    train(ValidateFirst(), RLProgress(), iterations=2, validate_every=2)

    lines = [line for line in capsys.readouterr().out.splitlines() if "iteration" in line]
    assert lines[0] == "before iteration 0  validation 0.500"
    assert ["validation" in line for line in lines[1:3]] == [False, True]
