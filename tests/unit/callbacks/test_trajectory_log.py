from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_rl.callbacks.trajectory_log import TrajectoryLog, log_table, sample_trajectories, trajectory_row
from lit_rl.types import Prompt


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_has_text_score_and_what_verls_dumps_lose(make_data, make_trajectory) -> None:
    trajectory = make_trajectory(policy_versions=[3, 4], seed=9, reward_notes={"pred": "12"})

    row = trajectory_row(trajectory, make_data().decode, {"row1": "9"}, 5)

    assert row == {
        "input": "1 2 3",
        "output": "four five",
        "gts": "9",
        "score": 1.0,
        "step": 5,
        "reward_parts": {"format": 0.5},
        "reward_notes": {"pred": "12"},
        "data_source": "sums",
        "row_id": "row1",
        "group_id": "0:row1",
        "sample_index": 0,
        "stop_reason": "stop",
        "num_turns": 2,
        "prompt_tokens": 3,
        "response_tokens": 2,
        "policy_version_min": 3,
        "policy_version_max": 4,
        "seed": 9,
        "messages": [],
        "error": None,
    }


def test_tool_tokens_are_in_the_output_and_their_version_is_not_counted(make_data, make_trajectory) -> None:
    trajectory = make_trajectory(
        response_ids=[4, 7, 5], loss_mask=[1, 0, 1], rollout_logprobs=[0.0] * 3, policy_versions=[3, -1, 4]
    )

    row = trajectory_row(trajectory, make_data().decode, {}, 0)

    assert row["output"] == "4 7 5"
    assert (row["policy_version_min"], row["policy_version_max"]) == (3, 4)


def test_a_failed_trajectory_keeps_its_error_and_has_no_score(make_data, make_trajectory) -> None:
    trajectory = make_trajectory(
        response_ids=[], loss_mask=[], rollout_logprobs=[], policy_versions=[], reward=None, error="boom", text=""
    )

    row = trajectory_row(trajectory, make_data().decode, {}, 0)

    assert (row["score"], row["error"], row["policy_version_min"]) == (None, "boom", None)


def test_the_same_rows_are_sampled_whenever_they_come_up(make_trajectory) -> None:
    everything = [make_trajectory(f"row{number}", sample) for number in range(20) for sample in range(2)]
    others = [make_trajectory(f"other{number}", 0) for number in range(3)]

    chosen = sample_trajectories(everything, 6)

    assert len(chosen) == 6
    assert chosen == sample_trajectories(list(reversed(everything)), 6)
    rows = {trajectory.row_id for trajectory in chosen}
    assert len(rows) == 3
    # Among further rows those already followed stay ahead of all but the new ones.
    again = {trajectory.row_id for trajectory in sample_trajectories(everything + others, 12)}
    assert rows <= again


def test_no_limit_writes_all_and_zero_none(make_trajectory) -> None:
    everything = [make_trajectory(f"row{number}") for number in range(5)]

    assert len(sample_trajectories(everything, -1)) == 5
    assert sample_trajectories(everything, 0) == []


def test_each_iteration_and_validation_gets_a_file(train, tmp_path, make_data, make_trajectory) -> None:
    data = make_data()
    data.last_trajectories = [make_trajectory("row1"), make_trajectory("row2")]
    data.last_validation_trajectories = [make_trajectory("row9")]
    data.sources["val"] = [Prompt(row_id="row9", messages=[], data_source="sums", ground_truth="7")]

    train(TrajectoryLog(), iterations=2, validate_every=2, data=data, num_sanity_val_steps=1)

    folder = tmp_path / "trajectories"
    # Case O46: nothing of the sanity check. The validation scored the weights of version 2.
    assert sorted(path.name for path in folder.iterdir()) == [
        "iteration_00000.jsonl",
        "iteration_00001.jsonl",
        "validation_00002.jsonl",
    ]
    assert [row["row_id"] for row in _lines(folder / "iteration_00001.jsonl")] == ["row1", "row2"]
    assert [row["step"] for row in _lines(folder / "iteration_00001.jsonl")] == [1, 1]
    (validation,) = _lines(folder / "validation_00002.jsonl")
    assert (validation["step"], validation["gts"]) == (2, "7")


def test_a_file_that_cannot_be_written_does_not_stop_the_run(
    train, tmp_path, make_data, make_trajectory, caplog
) -> None:
    data = make_data()
    data.last_trajectories = [make_trajectory()]
    (tmp_path / "trajectories/iteration_00000.jsonl").mkdir(parents=True)

    trainer = train(TrajectoryLog(), iterations=2, data=data)

    assert trainer.current_epoch == 2
    assert "Could not write" in caplog.text
    assert (tmp_path / "trajectories/iteration_00001.jsonl").exists()


def test_a_validation_is_a_table_in_tensorboard(tmp_path, make_data, make_trajectory, train) -> None:
    logger = TensorBoardLogger(tmp_path / "board")
    data = make_data()
    data.last_validation_trajectories = [
        make_trajectory("row1", text="a | b\n<b>c</b>"),
        make_trajectory("row2", reward=None, error="boom"),
    ]
    data.sources["val"] = [Prompt(row_id="row1", messages=[], data_source="sums", ground_truth={"target": ["7"]})]

    # Case O46: the sanity check adds no table. Validation at the version 2 only.
    train(TrajectoryLog(), iterations=2, validate_every=2, data=data, num_sanity_val_steps=1, logger=logger)

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (table,) = events.Tensors("val/generations/text_summary")
    assert table.step == 2
    (text,) = table.tensor_proto.string_val
    head, _, first, second = text.decode().splitlines()
    assert head == "| step | data_source | row_id | input | output | gts | score | error |"
    assert first == ("| 2 | sums | row1 | 1 2 3 | a &#124; b<br>&lt;b>c&lt;/b> | {'target': ['7']} | 1.0 | None |")
    assert second == "| 2 | sums | row2 | 1 2 3 | four five | None | None | boom |"


def test_a_validation_is_a_table_in_wandb(tmp_path, make_data, make_trajectory) -> None:
    sent = []

    class NotSending(WandbLogger):
        """Keeps what it would send; the table itself is wandb's."""

        def log_metrics(self, metrics, step=None) -> None:
            sent.append((step, metrics))

    trajectories = [make_trajectory("row1"), make_trajectory("row2", reward=None, error="boom")]
    truths = {"row1": 7, "row2": "seven"}  # one row's is a number, another's text, which wandb refuses in one column
    rows = [trajectory_row(trajectory, make_data().decode, truths, 3) for trajectory in trajectories]
    logger = NotSending(save_dir=tmp_path, offline=True)

    log_table(logger, rows, 3)
    log_table(logger, [], 4)

    ((step, metrics),) = sent
    assert (step, list(metrics)) == (3, ["val/generations"])
    table = metrics["val/generations"]
    assert table.columns == ["step", "data_source", "row_id", "input", "output", "gts", "score", "error"]
    assert table.data == [
        [3, "sums", "row1", "1 2 3", "four five", "7", 1.0, None],
        [3, "sums", "row2", "1 2 3", "four five", "seven", None, "boom"],
    ]


def test_the_table_holds_the_rows_that_are_followed(train, tmp_path, make_data, make_trajectory) -> None:
    data = make_data()
    data.last_validation_trajectories = [make_trajectory(f"row{number}") for number in range(5)]
    logger = TensorBoardLogger(tmp_path / "board")

    train(TrajectoryLog(max_per_iteration=0, max_in_table=2), iterations=1, data=data, logger=logger)

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (text,) = events.Tensors("val/generations/text_summary")[0].tensor_proto.string_val
    assert len(text.decode().splitlines()) == 2 + 2
    assert not (tmp_path / "trajectories").exists()


@pytest.mark.parametrize("option", ["max_per_iteration", "max_in_table"])
def test_a_negative_limit_is_refused(option) -> None:
    with pytest.raises(ValueError, match=f"{option}=-2"):
        TrajectoryLog(**{option: -2})
