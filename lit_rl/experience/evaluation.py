"""Validation, test and prediction: rollouts that are measured and not learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from lit_rl.experience.flat import FlatTrajectories
from lit_rl.metrics.evaluation import evaluation_metrics
from lit_rl.types import Trajectory


class EvaluationBatch:
    """All trajectories of one data source.

    Attributes:
        data_source: Name of the source.
        trajectories: This rank's: over all ranks every row, as often as asked for, failed ones included.
        metrics: Of all ranks' trajectories, the same on every rank, so that early stopping and checkpoints agree.
    """

    def __init__(self, data_source: str, trajectories: Sequence[Trajectory], metrics: dict[str, float]) -> None:
        self.data_source = data_source
        self.trajectories = trajectories
        self.metrics = metrics

    @classmethod
    def deal(cls, data_source: str, trajectories: Sequence[Trajectory], world_size: int) -> list[EvaluationBatch]:
        """Return the batch of each rank: every trajectory is in one of them.

        Args:
            data_source: Name of the source.
            trajectories: All of it.
            world_size: Ranks.
        """
        metrics = evaluation_metrics(data_source, trajectories)
        return [
            cls(data_source, own if rank == 0 else FlatTrajectories(own), metrics)
            for rank in range(world_size)
            for own in [trajectories[rank::world_size]]
        ]

    def to(self, device: torch.device | str, *args: object, **kwargs: object) -> EvaluationBatch:
        """Stay where it is: nothing here is a tensor."""
        return self


class EvaluationLoader:
    """Sized and lazy: one item per data source, rolled out when it is asked for."""

    def __init__(self, data_sources: Sequence[str], evaluate: Callable[[str], EvaluationBatch]) -> None:
        """Keep how to roll out.

        Args:
            data_sources: Names, in the order they are evaluated; the same on every rank.
            evaluate: Rolls out all rows of a source and returns this rank's batch.
        """
        self.data_sources = list(data_sources)
        self.evaluate = evaluate

    def __len__(self) -> int:
        """Data sources."""
        return len(self.data_sources)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """Roll out source by source."""
        for data_source in self.data_sources:
            yield self.evaluate(data_source)
