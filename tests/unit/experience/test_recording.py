"""Recordings: what is read back is what was written, to the last bit, and what does not fit is refused by name."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_rl.agents import TrajectoryRequest
from lit_rl.experience.recording import ReplayedRollouts, TrajectoryRecorder
from lit_rl.types import Prompt, SamplingParams, Trajectory

SETTINGS = {"seed": 1, "group_size": 2, "sampling.temperature": 0.7, "sampling.stop": ["\n"], "train_data": "3 rows"}


def trajectory(row: str = "a", sample: int = 0, iteration: int = 0, **changes: Any) -> Trajectory:
    values: dict[str, Any] = {
        "row_id": row, "group_id": f"{iteration}:0:{row}", "sample_index": sample, "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5], "loss_mask": [1, 0, 1], "rollout_logprobs": [-0.1, 0.0, -2.5],
        "policy_versions": [7, -1, 8], "reward": 0.1, "seed": 10 + sample,
    }  # fmt: skip
    return Trajectory(**(values | changes))


def request(row: str = "a", sample: int = 0, iteration: int = 0, seed: int | None = None) -> TrajectoryRequest:
    return TrajectoryRequest(
        prompt=Prompt(row_id=row, messages=[], data_source="s"),
        group_id=f"{iteration}:0:{row}",
        sample_index=sample,
        seed=10 + sample if seed is None else seed,
    )


def replay(folder: Path, *requests: TrajectoryRequest) -> list[Trajectory]:
    return asyncio.run(ReplayedRollouts(folder, SETTINGS).generate(list(requests), SamplingParams()))


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    branch = trajectory("a", 1, prompt_ids=[9], reward=1 / 3)
    scored = trajectory(
        "a",
        1,
        # A third, the smallest number there is, minus zero, and a float32 as the engine gives it.
        rollout_logprobs=[-1 / 3, -5e-324, -0.0],
        reward_parts={"accuracy": float(np.float32(0.1)), "unknown": math.inf},
        stop_reason="length",
        num_turns=4,
        text="línea\u2028 \x00 tab\t",
        messages=[{"role": "tool", "content": "Ω", "arguments": {"x": [1, 2.5, None]}}],
        metrics={"time/generate_s": 0.1 + 0.2},
        branches=[branch],
    )
    failed = trajectory("a", 0, reward=None, error="Traceback ...", response_ids=[], loss_mask=[], rollout_logprobs=[],
                        policy_versions=[])  # fmt: skip
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [failed, scored])

    # In the order that is asked for, not the recorded one.
    found = replay(tmp_path, request("a", 1), request("a", 0))

    assert found == [scored, failed]
    assert math.copysign(1.0, found[0].rollout_logprobs[2]) == -1.0


def test_not_a_number_survives(tmp_path: Path) -> None:
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [trajectory(reward_parts={"judge": math.nan})])

    (found,) = replay(tmp_path, request())

    assert math.isnan(found.reward_parts["judge"])


def test_numbers_of_numpy_and_media_do_not_break_a_recording(tmp_path: Path) -> None:
    odd = trajectory(
        reward_parts={"numpy": np.float32(0.1)}, messages=[{"content": Path("x")}], media={"image": [object()]}
    )
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [odd])

    (found,) = replay(tmp_path, request())

    assert found.reward_parts == {"numpy": float(np.float32(0.1))}
    assert (found.messages, found.media) == ([{"content": "x"}], {})


def test_every_trajectory_is_counted_as_it_is_found(tmp_path: Path) -> None:
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [trajectory(sample=sample) for sample in range(3)])
    counted: list[Trajectory] = []

    asyncio.run(
        ReplayedRollouts(tmp_path, SETTINGS).generate(
            [request(sample=sample) for sample in range(3)], SamplingParams(), on_finished=counted.append
        )
    )

    assert [item.sample_index for item in counted] == [0, 1, 2]


def test_the_run_folder_names_its_recording(tmp_path: Path) -> None:
    TrajectoryRecorder(tmp_path / "recording", SETTINGS).write(0, [trajectory()])

    assert replay(tmp_path, request()) == [trajectory()]


def test_a_folder_without_a_recording_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.replay_from=.*data\.record_trajectories=true"):
        ReplayedRollouts(tmp_path, SETTINGS)


def test_an_iteration_that_is_missing_is_named_with_those_there_are(tmp_path: Path) -> None:
    recorder = TrajectoryRecorder(tmp_path, SETTINGS)
    for iteration in (2, 3):
        recorder.write(iteration, [trajectory(iteration=iteration)])

    with pytest.raises(FileNotFoundError, match=r"lacks iteration 4; it holds 2 iterations from 2 to 3\. Set trainer"):
        replay(tmp_path, request(iteration=4))


def test_other_settings_are_named_with_both_values(tmp_path: Path) -> None:
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [trajectory()])

    with pytest.raises(
        ValueError,
        match=r"with other settings: data\.seed was 1 and is 2, data\.sampling\.temperature was 0\.7 and is 1\.0\. Re",
    ):
        ReplayedRollouts(tmp_path, SETTINGS | {"seed": 2, "sampling.temperature": 1.0})
    with pytest.raises(ValueError, match=r"data\.group_size was 2 and is 4.*Set trainer\.default_root_dir to another"):
        TrajectoryRecorder(tmp_path, SETTINGS | {"group_size": 4})


@pytest.mark.parametrize("asked", [request("b"), request("a", 1), request("a", 0, seed=99)])
def test_another_rollout_of_an_iteration_is_refused(tmp_path: Path, asked: TrajectoryRequest) -> None:
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [trajectory()])

    with pytest.raises(ValueError, match=r"another rollout of iteration 0: row ., sample \d, seed \d+ is not in it"):
        replay(tmp_path, asked)


def test_an_iteration_that_comes_up_again_replaces_the_first(tmp_path: Path) -> None:
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [trajectory()])
    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [trajectory(reward=0.5)])

    assert replay(tmp_path, request())[0].reward == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iteration_00000.jsonl.gz", "settings.json"]


def test_a_recording_that_cannot_be_written_does_not_stop_the_run(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "iteration_00000.jsonl.gz.partial").mkdir()

    TrajectoryRecorder(tmp_path, SETTINGS).write(0, [trajectory()])

    assert "Iteration 0 is not recorded" in caplog.text
    with pytest.raises(FileNotFoundError, match=r"lacks iteration 0; it holds none"):
        replay(tmp_path, request())
