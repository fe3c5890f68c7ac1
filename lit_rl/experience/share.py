"""What ranks get of an iteration: the scalars of all sequences, and the tokens of those that a rank learns from.

Position in the flow: collector -> **Rollout** -> plan -> **ExperienceShare** per rank -> mailbox -> **Experience**.
Every rank plans for itself, from the same scalars. A share travels as a few flat arrays: a receiving rank reads them in
Ray's object store, where they are, and makes trajectories of them one at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from lit_rl.experience.batch import Experience
from lit_rl.experience.plan import IterationPlan, plan_iteration
from lit_rl.experience.progress import PhaseProgress
from lit_rl.types import Trajectory


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """How an iteration's sequences are cut into steps; see `plan_iteration`.

    Attributes:
        num_mini_batches: Optimizer steps per pass.
        ppo_epochs: Passes over the experience.
        max_tokens: Token budget of a micro-batch.
        micro_batch_size: Most trajectories of one; ``None`` leaves it to the budget.
        share_prompts: Compute the prompt of a group once per micro-batch.
    """

    num_mini_batches: int = 1
    ppo_epochs: int = 1
    max_tokens: int
    micro_batch_size: int | None = None
    share_prompts: bool = True


@dataclass(frozen=True, kw_only=True)
class SequenceScalars:
    """What every rank knows of an iteration's N sequences; failed ones are not among them.

    Attributes:
        iteration: From 0.
        temperature: Of the sampling.
        plan_seed: Seeds the composition of mini-batches.
        lengths: ``[N]`` tokens of prompt and response.
        prompt_lengths: ``[N]`` tokens.
        loss_tokens: ``[N]`` tokens the policy sampled.
        rewards: ``[N]``.
        group_ids: ``[N]`` dense numbers, equal for trajectories of one prompt.
        prompt_groups: ``[N]`` dense numbers, equal where also the prompt's tokens are: a branch has its own.
        greedy_rewards: ``[N]``, NaN where the greedy trajectory failed; ``None`` where there are none.
        metrics: Numbers of the rollout, ready to log.
    """

    iteration: int
    temperature: float
    plan_seed: int
    lengths: list[int]
    prompt_lengths: list[int]
    loss_tokens: list[int]
    rewards: list[float]
    group_ids: list[int]
    prompt_groups: list[int]
    greedy_rewards: list[float] | None
    metrics: dict[str, float]

    def plan(self, settings: PlanSettings, world_size: int) -> IterationPlan:
        """Plan the iteration: a pure function, so that every rank gets the same plan without being told.

        Args:
            settings: The run's.
            world_size: Data-parallel ranks.
        """
        return plan_iteration(
            self.lengths,
            world_size,
            settings.num_mini_batches,
            settings.ppo_epochs,
            settings.max_tokens,
            self.plan_seed,
            loss_tokens=self.loss_tokens,
            prompt_lengths=self.prompt_lengths,
            group_ids=self.prompt_groups,
            share_prompts=settings.share_prompts,
            micro_batch_size=settings.micro_batch_size,
        )


@dataclass(frozen=True, kw_only=True)
class ExperienceShare:
    """One rank's part of an iteration.

    Attributes:
        scalars: Of all sequences.
        rank: Data-parallel rank.
        trajectories: The rank's, ascending in their global index.
    """

    scalars: SequenceScalars
    rank: int
    trajectories: Sequence[Trajectory]

    def experience(self, settings: PlanSettings, world_size: int, phase: PhaseProgress | None = None) -> Experience:
        """Make what the rank learns from.

        Args:
            settings: The run's.
            world_size: Data-parallel ranks.
            phase: Where progress is told.
        """
        scalars = self.scalars
        plan = scalars.plan(settings, world_size)
        greedy = scalars.greedy_rewards
        return Experience(
            iteration=scalars.iteration,
            temperature=scalars.temperature,
            plan=plan,
            trajectories=self.trajectories,
            indices=plan.rank_sequences[self.rank],
            rewards=torch.tensor(scalars.rewards, dtype=torch.float32),
            group_ids=torch.tensor(scalars.group_ids, dtype=torch.int64),
            loss_tokens=torch.tensor(scalars.loss_tokens, dtype=torch.int64),
            greedy_rewards=None if greedy is None else torch.tensor(greedy, dtype=torch.float32),
            share_prompts=settings.share_prompts,
            metrics={**scalars.metrics, **plan.metrics},
            phase=phase,
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What the collector brings back from an iteration, on the rank that collects.

    Attributes:
        scalars: Of all sequences.
        sequences: N trajectories and branches that did not fail.
    """

    scalars: SequenceScalars
    sequences: list[Trajectory]

    def deal(self, settings: PlanSettings, world_size: int) -> list[ExperienceShare]:
        """Return the share of each rank; the first, for this process, holds the trajectories as they are.

        Args:
            settings: The run's.
            world_size: Data-parallel ranks.
        """
        parts = [
            [self.sequences[index] for index in indices]
            for indices in self.scalars.plan(settings, world_size).rank_sequences
        ]
        return [
            ExperienceShare(scalars=self.scalars, rank=rank, trajectories=part if rank == 0 else FlatTrajectories(part))
            for rank, part in enumerate(parts)
        ]


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
