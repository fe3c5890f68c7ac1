"""Which of Lightning's strategies a run may use, checked before anything starts."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy

from lit_rl.strategies.deepspeed import DeepSpeedStrategy
from lit_rl.strategies.fsdp2 import FSDP2Strategy

_USE = "Use auto (one device), ddp, or the class path lit_rl.strategies.FSDP2Strategy or .DeepSpeedStrategy."


def check_strategy(strategy: Strategy, backend: str, num_nodes: int = 1) -> None:
    """Refuse a strategy that would train wrongly, or not at all.

    Args:
        strategy: The Trainer's.
        backend: ``ray`` or ``inline``: how the rollout side runs.
        num_nodes: Machines of the trainer.

    Raises:
        ValueError: Naming the strategy and what to use instead.
    """
    name = type(strategy).__name__
    if isinstance(strategy, SingleDeviceStrategy):
        return
    if type(strategy) is not DDPStrategy and not isinstance(strategy, FSDP2Strategy | DeepSpeedStrategy):
        raise ValueError(f"trainer.strategy={name} is not supported. {_USE}")
    _check_start_method(strategy)
    if backend == "ray" and num_nodes > 1 and "RAY_ADDRESS" not in os.environ:
        raise ValueError(
            f"trainer.num_nodes={num_nodes} with data.backend=ray: ranks on other machines reach the rollout side "
            "through Ray, which then must run on all of them. Start a cluster (ray start) and set RAY_ADDRESS."
        )


def _check_start_method(strategy: ParallelStrategy) -> None:
    start_method: Any = getattr(strategy, "_start_method", "popen")
    if start_method != "popen":
        raise ValueError(
            f"trainer.strategy starts its ranks with {start_method!r}, and a forked or spawned rank cannot share Ray "
            "and engines with this process. Use trainer.strategy=ddp from a script."
        )
