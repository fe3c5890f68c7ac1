"""Numbers of an iteration's updates, collected on the device and read once at the end of the iteration.

Token-wise quantities are means over tokens, whatever the micro-batches were: each is kept as a sum and a weight. Losses
already carry the global normalisation, so the module sums them over micro-batches and averages over optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PolicyMetrics:
    """Accumulates weighted means, counts, and maxima, where the values are: reading them would wait for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._counts: dict[str, float] = {}

    def mean(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a value to a weighted mean; weight 0 adds nothing."""
        value, weight = _on_one_device(value, weight)
        # Not a plain product: NaN times 0 would be NaN.
        summand = torch.where(weight != 0, value * weight, 0.0)
        self._sums[name] = self._sums[name] + summand if name in self._sums else summand
        self._weights[name] = self._weights[name] + weight if name in self._weights else weight

    def maximum(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value."""
        value = torch.as_tensor(value).detach().double()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a count."""
        self._counts[name] = self._counts.get(name, 0.0) + amount

    def compute(self, gather: Callable[[Any], list[Any]] = lambda own: [own]) -> dict[str, float]:
        """Everything collected so far, as numbers; what has no weight is left out. Starts anew.

        Args:
            gather: Returns what every rank has passed in. Means are over all ranks' weights; counts are of what all
                ranks do together.
        """
        sums = {name: (float(total), float(self._weights[name])) for name, total in self._sums.items()}
        maxima = {name: float(value) for name, value in self._maxima.items()}
        ranks = gather((sums, maxima, dict(self._counts)))
        self._sums, self._weights, self._maxima, self._counts = {}, {}, {}, {}
        result: dict[str, float] = {}
        for name in dict.fromkeys(name for rank_sums, _, _ in ranks for name in rank_sums):
            pairs = [rank_sums.get(name, (0.0, 0.0)) for rank_sums, _, _ in ranks]
            weight = sum(pair[1] for pair in pairs)
            if weight > 0:
                result[name] = sum(pair[0] for pair in pairs) / weight
        for _, maxima, counts in ranks:
            for name, value in (maxima | counts).items():
                result[name] = max(value, result.get(name, value))
        return result


def _on_one_device(value: Tensor | float, weight: Tensor | float) -> tuple[Tensor, Tensor]:
    """Both as float64 without graph, where either of them is if that is not the CPU: `torch.where` takes no mixture."""
    value, weight = torch.as_tensor(value).detach(), torch.as_tensor(weight).detach()
    device = weight.device if value.device.type == "cpu" else value.device
    return value.to(device, torch.float64), weight.to(device, torch.float64)
