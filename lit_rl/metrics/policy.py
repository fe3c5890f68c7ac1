"""Numbers of an iteration's updates, collected on the device and read once at the end of the iteration.

Token-wise quantities are means over tokens, whatever the micro-batches were: each is kept as a sum and a weight. Losses
already carry the global normalisation, so they are summed over micro-batches and averaged over optimizer steps.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PolicyMetrics:
    """Accumulates weighted means, sums per step, and maxima."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def mean(self, name: str, value: Tensor | float, weight: Tensor | float = 1.0) -> None:
        """Add a value to a weighted mean; weight 0 adds nothing."""
        value, weight = torch.as_tensor(value).detach().double(), torch.as_tensor(weight).detach().double()
        self._sums[name] = self._sums.get(name, torch.zeros((), dtype=torch.float64)) + (value * weight).cpu()
        self._weights[name] = self._weights.get(name, torch.zeros((), dtype=torch.float64)) + weight.cpu()

    def maximum(self, name: str, value: Tensor | float) -> None:
        """Keep the largest value."""
        value = torch.as_tensor(value).detach().double().cpu()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def compute(self) -> dict[str, float]:
        """Everything collected so far, as numbers; what has no weight is left out. Starts anew."""
        means = {name: total / self._weights[name] for name, total in self._sums.items() if self._weights[name] > 0}
        result = {name: float(value) for name, value in (means | self._maxima).items()}
        self._sums, self._weights, self._maxima = {}, {}, {}
        return result
