"""Trajectories as a few flat arrays: how a rank's share of an iteration travels and lies in memory.

A receiving rank reads the arrays in Ray's object store, where they are, and makes records of them one at a time.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_rl.types import Trajectory

_TOKEN_FIELDS = ("response_ids", "loss_mask", "rollout_logprobs", "policy_versions")
_TOKEN_DTYPES: dict[str, Any] = {
    "prompt_ids": np.int32,
    "response_ids": np.int32,
    "loss_mask": np.uint8,
    "rollout_logprobs": np.float32,  # what the loss computes in
    "policy_versions": np.int32,
}
# Nothing that learns reads these, and a branch is a sequence of its own.
_LEFT_OUT = ("media", "branches")


class FlatTrajectories(Sequence[Trajectory]):
    """Trajectories whose tokens lie end to end in one array per field, made into records when they are asked for.

    Takes 13 bytes per response token, a tenth of what lists of Python numbers take. Without media and branches.
    """

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        """Copy the tokens.

        Args:
            trajectories: Neighbours with equal prompts share one copy of it.
        """
        prompts: list[list[int]] = []
        self._prompt_of: list[int] = []
        for trajectory in trajectories:
            if not prompts or prompts[-1] != trajectory.prompt_ids:
                prompts.append(trajectory.prompt_ids)
            self._prompt_of.append(len(prompts) - 1)
        self._prompt_ends = _ends(prompts)
        self._ends = _ends([trajectory.response_ids for trajectory in trajectories])
        self._columns: dict[str, NDArray[Any]] = {"prompt_ids": _flat(prompts, _TOKEN_DTYPES["prompt_ids"])}
        for name in _TOKEN_FIELDS:
            self._columns[name] = _flat([getattr(t, name) for t in trajectories], _TOKEN_DTYPES[name])
        plain = [
            field.name for field in dataclasses.fields(Trajectory) if field.name not in (*_TOKEN_DTYPES, *_LEFT_OUT)
        ]
        self._rest = [{name: getattr(trajectory, name) for name in plain} for trajectory in trajectories]

    def tensors(self, name: str) -> list[Tensor]:
        """Return one field of every trajectory, ``[T_i]`` each, in the array's memory: they must not be written to.

        Args:
            name: ``response_ids``, ``loss_mask``, ``rollout_logprobs`` or ``policy_versions``.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # the object store's memory is read-only
            whole = torch.from_numpy(self._columns[name])
        return list(whole.split(np.diff(self._ends).tolist()))

    @property
    def num_bytes(self) -> int:
        """Bytes of the token arrays."""
        return sum(column.nbytes for column in self._columns.values())

    def __len__(self) -> int:
        return len(self._rest)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        """Make the record of one trajectory, or of several."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        prompt, prompt_ends, ends = self._prompt_of[index], self._prompt_ends, self._ends
        tokens = {
            name: self._columns[name][ends[index] : ends[index + 1]].tolist() for name in _TOKEN_FIELDS
        }  # fmt: skip
        prompt_ids = self._columns["prompt_ids"][prompt_ends[prompt] : prompt_ends[prompt + 1]].tolist()
        return Trajectory(prompt_ids=prompt_ids, **tokens, **self._rest[index])


def _flat(rows: Sequence[Sequence[Any]], dtype: Any) -> NDArray[Any]:
    return np.fromiter((value for row in rows for value in row), dtype=dtype, count=sum(len(row) for row in rows))


def _ends(rows: Sequence[Sequence[Any]]) -> list[int]:
    """``[len(rows) + 1]`` positions at which each row begins in the flat array, and where the last one ends."""
    return [0, *np.cumsum([len(row) for row in rows], dtype=np.int64).tolist()]
