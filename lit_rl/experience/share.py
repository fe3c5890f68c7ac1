"""What ranks get of an iteration: the scalars of all sequences, and the tokens of those that a rank learns from.

Position in the flow: collector -> **Rollout** -> plan -> **ExperienceShare** per rank -> mailbox -> **Experience**.
Every rank plans for itself, from the same scalars.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lit_rl.experience.batch import Experience
from lit_rl.experience.flat import FlatTrajectories
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

    def deal(self, settings: PlanSettings, world_size: int) -> Iterator[ExperienceShare]:
        """Yield the share of each rank; the first, for this process, holds the trajectories as they are.

        One after the other: whoever sends one on holds no more than one copy of a share.

        Args:
            settings: The run's.
            world_size: Data-parallel ranks.
        """
        for rank, indices in enumerate(self.scalars.plan(settings, world_size).rank_sequences):
            part = [self.sequences[index] for index in indices]
            yield ExperienceShare(
                scalars=self.scalars, rank=rank, trajectories=part if rank == 0 else FlatTrajectories(part)
            )
