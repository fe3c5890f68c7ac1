"""The random states of a training process, in a form that loads in torch's strict mode.

lit_rl draws nothing from them: row order and sampling follow from seeds. They are kept for user code, and for networks
with dropout or random initialisation of their own.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def collect_random_states(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators, as tensors and plain values.

    Args:
        device: This process's; a GPU's generator is kept as well.
    """
    kind, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached_gaussian),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put the generators back.

    Args:
        states: From `collect_random_states`.
        device: This process's; a GPU's generator is put back where the states have one.
    """
    random.setstate(states["python"])
    kind, keys, *others = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *others))
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
