"""Record an iteration's trajectories without loss, and roll them out again from disk, without an engine.

Position in the flow: the collector hands what it rolled out to a `TrajectoryRecorder`; in a replay `ReplayedRollouts`
stands where agent loops and replicas would, and answers the same requests. Everything after that is the same code: from
the same weights, a replay makes the same updates.

A recording is a folder: ``settings.json`` with what decides which trajectories are asked for, and one gzipped file of
JSON lines per iteration, a trajectory per line. JSON's floats are written so that they read back exactly. What is not
in it: images and videos of tools, which the policy does not read, and validation.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_rl.agents import TrajectoryRequest
from lit_rl.data import PromptCursor
from lit_rl.rewards.result import as_number
from lit_rl.types import SamplingParams, Trajectory

log = logging.getLogger(__name__)

RECORDING = "recording"
"""Folder of a recording, in the run folder."""
_SETTINGS = "settings.json"
_OPTIONS = (
    "model_name",
    "seed",
    "prompts_per_iteration",
    "group_size",
    "greedy_baseline",
    "dynamic_sampling_rounds",
    "max_prompt_tokens",
)


def rollout_settings(data: Any, cursor: PromptCursor) -> dict[str, Any]:
    """What decides which trajectories a run asks for and how their tokens were drawn, as plain values.

    Settings of learning are not among them: the same trajectories may be learnt from in another way.

    Args:
        data: A RolloutDataModule.
        cursor: Its place in the training rows.
    """
    settings = {name: getattr(data, name) for name in _OPTIONS}
    settings |= {f"sampling.{name}": value for name, value in asdict(data.sampling).items() if name != "max_tokens"}
    rows = cursor.state_dict()
    return settings | {
        "max_response_tokens": data.max_response_tokens,
        "shuffle": rows["shuffle"],
        "train_data": f"{rows['num_rows']} rows, fingerprint {rows['fingerprint']}",
    }


class TrajectoryRecorder:
    """Writes a recording, iteration by iteration."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        """Make the folder.

        Args:
            folder: Where the recording goes. Iterations that are there already are replaced as they come up again.
            settings: From `rollout_settings`.

        Raises:
            ValueError: If the folder holds a recording made with other settings; names them.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _SETTINGS
        if path.exists():
            _check_settings(path, settings, "Set trainer.default_root_dir to another folder, or remove it.")
        path.write_text(json.dumps(settings, indent=1) + "\n")

    def write(self, iteration: int, trajectories: Iterable[Trajectory]) -> None:
        """Write one iteration; the file has its name once it is complete.

        Args:
            iteration: From 0.
            trajectories: All that were rolled out, scored and failed ones.
        """
        target = _file(self.folder, iteration)
        aside = target.with_name(target.name + ".partial")
        try:
            with gzip.open(aside, "wt", compresslevel=1, encoding="utf-8") as file:
                for trajectory in trajectories:
                    file.write(json.dumps(_to_plain(trajectory), default=_number_or_text) + "\n")
            os.replace(aside, target)
        except OSError as error:
            # As for every log: no reason to lose a run. A replay will name the iteration that is missing.
            log.warning("Iteration %d is not recorded: %s", iteration, error)


class ReplayedRollouts:
    """Answers requests from a recording, in the place of agent loops and of the replicas' versions."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]) -> None:
        """Open a recording and check that it is one of these settings.

        Args:
            folder: A recording, or the run folder it is in.
            settings: From `rollout_settings`.

        Raises:
            FileNotFoundError: If there is no recording.
            ValueError: If it was made with other settings; names them.
        """
        given = Path(folder)
        self.folder = given if (given / _SETTINGS).exists() else given / RECORDING
        if not (self.folder / _SETTINGS).exists():
            raise FileNotFoundError(
                f"data.replay_from={given}: there is no recording in it. Give the run folder of a run with "
                "data.record_trajectories=true."
            )
        _check_settings(self.folder / _SETTINGS, settings, "Replay with the settings of the recorded run.")
        self._iteration = -1
        self._trajectories: dict[tuple[str, int], Trajectory] = {}

    def require_version(self, version: int, iteration: int) -> None:
        """Nothing to wait for: no replica takes part."""

    async def generate(
        self,
        requests: Sequence[TrajectoryRequest],
        sampling: SamplingParams,
        *,
        on_finished: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """Look up the trajectory of each request.

        Args:
            requests: Of one iteration.
            sampling: What they were drawn with; checked with the settings.
            on_finished: Called with each.

        Raises:
            FileNotFoundError: If the recording lacks the iteration.
            ValueError: If it holds another rollout of it.
        """
        trajectories = [self._find(request) for request in requests]
        for trajectory in trajectories:
            if on_finished is not None:
                on_finished(trajectory)
        return trajectories

    def _find(self, request: TrajectoryRequest) -> Trajectory:
        # The collector's group ids begin with the iteration.
        iteration = int(request.group_id.partition(":")[0])
        if iteration != self._iteration:
            self._trajectories = {(t.group_id, t.sample_index): t for t in self._read(iteration)}
            self._iteration = iteration
        found = self._trajectories.get((request.group_id, request.sample_index))
        if found is None or found.seed != request.seed:
            raise ValueError(
                f"The recording {self.folder} has another rollout of iteration {iteration}: row "
                f"{request.prompt.row_id}, sample {request.sample_index}, seed {request.seed} is not in it. Start from "
                "the beginning, or from a checkpoint of the recorded run."
            )
        return found

    def _read(self, iteration: int) -> list[Trajectory]:
        path = _file(self.folder, iteration)
        if not path.exists():
            raise FileNotFoundError(
                f"The recording {self.folder} lacks iteration {iteration}; it holds {_iterations(self.folder)}. Set "
                "trainer.max_epochs and ckpt_path so that the replay stays within it."
            )
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return [_to_trajectory(json.loads(line)) for line in file]


def _file(folder: Path, iteration: int) -> Path:
    return folder / f"iteration_{iteration:05d}.jsonl.gz"


def _iterations(folder: Path) -> str:
    numbers = sorted(int(path.name.split("_")[1].split(".")[0]) for path in folder.glob("iteration_*.jsonl.gz"))
    return f"{len(numbers)} iterations from {numbers[0]} to {numbers[-1]}" if numbers else "none"


def _check_settings(path: Path, settings: Mapping[str, Any], fix: str) -> None:
    recorded = json.loads(path.read_text())
    # Through JSON as well, so that equal values compare equal.
    current = json.loads(json.dumps(settings))
    changed = [name for name in {**recorded, **current} if recorded.get(name) != current.get(name)]
    if changed:
        differences = ", ".join(
            f"data.{name} was {recorded.get(name)!r} and is {current.get(name)!r}" for name in changed
        )
        raise ValueError(f"The recording {path.parent} was made with other settings: {differences}. {fix}")


def _to_plain(trajectory: Trajectory) -> dict[str, Any]:
    """The fields by name. Not `dataclasses.asdict`, which copies every token on its own."""
    branches = [_to_plain(branch) for branch in trajectory.branches]
    return {**vars(trajectory), "media": {}, "branches": branches}


def _to_trajectory(plain: dict[str, Any]) -> Trajectory:
    return Trajectory(**{**plain, "branches": [_to_trajectory(branch) for branch in plain["branches"]]})


def _number_or_text(value: Any) -> float | str:
    """NumPy's and torch's numbers as floats; whatever else tools leave in messages as text."""
    number = as_number(value)
    return str(value) if number is None else number
