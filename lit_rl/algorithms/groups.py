"""Sums, means and extremes over groups of rows, without a loop over rows or groups.

A group is what shares a group id: the trajectories of one prompt. Rows of a group may lie anywhere in the batch.
Statistics are kept in float64: the mean of four rewards of 0.3 is then 0.3, and no rounding residue is blown up by a
division by the spread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Which group every row belongs to.

    Attributes:
        index: ``[N]`` int64, position of the row's group in 0..num_groups-1.
        sizes: ``[num_groups]`` float64, rows per group.
    """

    index: Tensor
    sizes: Tensor

    @classmethod
    def from_ids(cls, group_ids: Tensor) -> Groups:
        """Number the groups of ``[N]`` integer ids, whatever their values."""
        _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index=index, sizes=sizes.double())

    @property
    def num_groups(self) -> int:
        """How many different ids there are."""
        return self.sizes.shape[0]

    @property
    def row_sizes(self) -> Tensor:
        """``[N]`` float64: size of each row's own group."""
        return self.sizes[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Return the ``[num_groups]`` float64 sums of ``[N]`` values."""
        totals = torch.zeros(self.num_groups, dtype=torch.float64, device=values.device)
        return totals.index_add_(0, self.index, values.double())

    def mean(self, values: Tensor) -> Tensor:
        """Return the ``[num_groups]`` float64 means of ``[N]`` values."""
        return self.sum(values) / self.sizes

    def max(self, values: Tensor) -> Tensor:
        """Return the ``[num_groups]`` float64 maxima of ``[N]`` values."""
        return self._extreme(values, "amax", -torch.inf)

    def min(self, values: Tensor) -> Tensor:
        """Return the ``[num_groups]`` float64 minima of ``[N]`` values."""
        return self._extreme(values, "amin", torch.inf)

    def has_no_spread(self, values: Tensor) -> Tensor:
        """Return ``[num_groups]`` bool: all values of the group are exactly equal; True for a group of one."""
        return self.max(values) == self.min(values)

    def centre(self, values: Tensor) -> Tensor:
        """Return ``[N]`` float64: values minus their group's mean, exactly 0 in groups without spread."""
        centred = values.double() - self.mean(values)[self.index]
        return centred.masked_fill(self.has_no_spread(values)[self.index], 0.0)

    def spread(self, values: Tensor) -> Tensor:
        """Return the ``[num_groups]`` float64 sample standard deviations (divisor n - 1), 0 for a group of one."""
        return (self.sum(self.centre(values).square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def _extreme(self, values: Tensor, reduce: str, start: float) -> Tensor:
        extremes = torch.full((self.num_groups,), start, dtype=torch.float64, device=values.device)
        return extremes.scatter_reduce_(0, self.index, values.double(), reduce)
