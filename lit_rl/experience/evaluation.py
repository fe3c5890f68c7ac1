"""Validation, test and prediction: rollouts that are measured and not learnt from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from lit_rl.types import Trajectory


class EvaluationBatch:
    """All trajectories of one data source.

    Attributes:
        data_source: Name of the source.
        trajectories: Every row of it, as often as asked for, failed ones included.
    """

    def __init__(self, data_source: str, trajectories: list[Trajectory]) -> None:
        self.data_source = data_source
        self.trajectories = trajectories

    def to(self, device: torch.device | str, *args: object, **kwargs: object) -> EvaluationBatch:
        """Stay where it is: nothing here is a tensor."""
        return self


class EvaluationLoader:
    """Sized and lazy: one item per data source, rolled out when it is asked for."""

    def __init__(self, data_sources: Sequence[str], evaluate: Callable[[str], list[Trajectory]]) -> None:
        """Keep how to roll out.

        Args:
            data_sources: Names, in the order they are evaluated.
            evaluate: Rolls out all rows of a source.
        """
        self.data_sources = list(data_sources)
        self.evaluate = evaluate

    def __len__(self) -> int:
        """Data sources."""
        return len(self.data_sources)

    def __iter__(self) -> Iterator[EvaluationBatch]:
        """Roll out source by source."""
        for data_source in self.data_sources:
            yield EvaluationBatch(data_source, self.evaluate(data_source))
