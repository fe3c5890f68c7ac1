"""Whether the rented machine goes away before another iteration could be saved.

Two clouds announce the end of a capacity block in the environment, in seconds since 1970: Volcano Engine and SageMaker.
"""

from __future__ import annotations

import logging
import math
import os
import time

log = logging.getLogger(__name__)

SAVING_S = 60.0
"""Seconds allowed for writing a checkpoint."""
_VOLCANO = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
_SAGEMAKER = "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


def expires_soon(longest_iteration_s: float, margin_s: float = 0.0) -> bool:
    """Whether the machine ends within another iteration, a save and a margin.

    Args:
        longest_iteration_s: Duration of the longest iteration so far, in seconds.
        margin_s: Further seconds, at least 0.
    """
    name = _VOLCANO if os.environ.get(_VOLCANO) else _SAGEMAKER
    value = os.environ.get(name)
    if not value:
        return False
    try:
        remaining_s = float(value) - time.time()
    except ValueError:
        remaining_s = math.nan
    if not math.isfinite(remaining_s):
        log.warning("%s=%r is no time in seconds since 1970; checkpoints do not go by it.", name, value)
        return False
    # Volcano Engine leaves the time of a block that has ended in place.
    if name == _VOLCANO and remaining_s <= 0:
        return False
    return remaining_s <= SAVING_S + longest_iteration_s + margin_s
