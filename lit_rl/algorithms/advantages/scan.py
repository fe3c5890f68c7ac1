"""The backward recurrence behind returns and generalized advantage estimates, over all rows at once.

Steps run over time in a time-major copy, one fused operation on ``[B]`` contiguous numbers each. Masked positions
take part with a decay of 1 and a value of 0, so that credit passes over them unchanged and rows need no compaction.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def backward_scan(values: Tensor, decays: Tensor) -> Tensor:
    """Return x with ``x[t] = values[t] + decays[t] * x[t + 1]`` and ``x[T] = 0``.

    Args:
        values: ``[T, B]`` float, time-major.
        decays: ``[T, B]`` float.

    Returns:
        ``[T, B]`` of the values' dtype.
    """
    result = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    carried = torch.zeros_like(values[0]) if values.shape[0] else values
    steps = zip(reversed(values.unbind(0)), reversed(decays.unbind(0)), reversed(result.unbind(0)), strict=True)
    for value, decay, target in steps:
        carried = torch.addcmul(value, decay, carried, out=target)
    return result


def time_major(tensor: Tensor) -> Tensor:
    """Return a contiguous ``[T, B]`` copy of a ``[B, T]`` tensor."""
    return tensor.detach().t().contiguous()
