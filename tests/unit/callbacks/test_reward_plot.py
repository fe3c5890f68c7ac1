from __future__ import annotations

import pytest

from lit_rl.callbacks import IterationCheckpoint, RewardPlot, ValidateFirst

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_points_are_the_logged_numbers_with_validation_at_the_weights_it_scored(
    train, tmp_path, make_module
) -> None:
    plot = RewardPlot()
    train(plot, iterations=4, validate_every=2, module=make_module(scores=[0.0, 0.25, 0.0, 0.75]))

    assert plot.state_dict() == {
        "train": [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)],
        "length": [(0, 8.0), (1, 8.0), (2, 8.0), (3, 8.0)],
        # After iteration 1 the weights have version 2.
        "validation": {"sums": [(2, 0.25), (4, 0.75)]},
    }
    assert (tmp_path / "reward.png").read_bytes().startswith(PNG)


def test_the_curve_of_a_resumed_run_begins_where_the_first_began(train, tmp_path) -> None:
    train(RewardPlot(), IterationCheckpoint(), iterations=2)
    plot = RewardPlot()
    train(plot, IterationCheckpoint(), iterations=3, ckpt_path=str(tmp_path / "checkpoints/last.ckpt"))

    assert [iteration for iteration, _ in plot.state_dict()["train"]] == [0, 1, 2]


def test_the_plot_is_drawn_during_the_run(train, tmp_path) -> None:
    drawn: list[int] = []

    class Watched(RewardPlot):
        def draw(self, trainer) -> None:
            drawn.append(trainer.current_epoch)

    train(Watched(every_n_iterations=2), iterations=5)

    # At the end the counter stands at the number of finished iterations.
    assert drawn == [1, 3, 5]


def test_a_sanity_check_leaves_no_point(train) -> None:
    # Case O46.
    plot = RewardPlot()
    train(plot, iterations=2, validate_every=2, num_sanity_val_steps=1)

    assert plot.state_dict()["validation"] == {"sums": [(2, 0.5)]}


def test_an_interval_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="every_n_iterations=0"):
        RewardPlot(every_n_iterations=0)


def test_a_validation_before_training_is_the_curves_first_point(train) -> None:
    plot = RewardPlot()
    train(ValidateFirst(), plot, iterations=2, validate_every=2)

    assert plot.state_dict()["validation"] == {"sums": [(0, 0.5), (2, 0.5)]}
