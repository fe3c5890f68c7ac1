"""One guarded optimizer step: clip every parameter group by itself, and refuse to step on what is not finite.

Position in the flow: gradients of all micro-batches -> **clip, check, step** -> next mini-batch.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lit_rl.strategies import DeepSpeedStrategy

log = logging.getLogger(__name__)


class GuardedStep:
    """Steps an optimizer whose parameter groups have names.

    Args:
        max_grad_norms: Largest gradient norm by group name; larger ones are scaled down to it.
        max_skipped_steps: Refused steps in a row that end the run.
    """

    def __init__(self, max_grad_norms: Mapping[str, float], max_skipped_steps: int) -> None:
        self.max_grad_norms = max_grad_norms
        self.max_skipped_steps = max_skipped_steps
        self.num_skipped_in_a_row = 0

    def step(
        self,
        optimizer: Any,
        loss: Tensor,
        frozen: Collection[str] = (),
        engine: DeepSpeedStrategy | None = None,
    ) -> dict[str, Tensor] | None:
        """Clip and step.

        Args:
            optimizer: Its gradients are complete.
            loss: Scalar they came from, over all ranks: every rank must come to the same conclusion.
            frozen: Groups that stay as they are, weights and moments alike.
            engine: Strategy that clips and steps by itself.

        Returns:
            Gradient norm before clipping by group name, frozen ones left out, or the ``joint`` one of an engine;
            ``None`` where the step was refused.

        Raises:
            RuntimeError: After ``max_skipped_steps`` refused steps in a row.
        """
        norms = self._clip(optimizer, frozen) if engine is None else self._engine_step(optimizer, frozen, engine)
        if not all(bool(torch.isfinite(number)) for number in (loss, *norms.values())):
            self._refuse(loss, norms)
            return None
        self.num_skipped_in_a_row = 0
        if engine is None:
            optimizer.step()
        return norms

    def _clip(self, optimizer: Any, frozen: Collection[str]) -> dict[str, Tensor]:
        """Clip every group by itself."""
        norms: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            if group["name"] in frozen:
                for parameter in group["params"]:
                    parameter.grad = None  # AdamW passes over it; a gradient of zero would let the momentum move it
                continue
            limit = self.max_grad_norms[group["name"]]
            norm = torch.nn.utils.clip_grad_norm_(group["params"], limit)
            # Of shards, the norm is a shard itself: the whole is a sum over ranks.
            norms[group["name"]] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return norms

    @staticmethod
    def _engine_step(optimizer: Any, frozen: Collection[str], engine: DeepSpeedStrategy) -> dict[str, Tensor]:
        """Clip all groups together and step, unless a gradient is not finite."""
        names = [group["name"] for group in optimizer.param_groups]
        numbers = [number for number, name in enumerate(names) if name in frozen]
        return {names[0] if len(names) == 1 else "joint": engine.step_and_norm(optimizer, numbers)}

    def _refuse(self, loss: Tensor, norms: Mapping[str, Tensor]) -> None:
        """Count a step that would have destroyed the weights, and stop after too many in a row."""
        self.num_skipped_in_a_row += 1
        readable = ", ".join(f"{name} {float(norm)}" for name, norm in norms.items())
        log.warning("Optimizer step skipped: loss %s, gradient norm %s.", float(loss), readable)
        if self.num_skipped_in_a_row >= self.max_skipped_steps:
            raise RuntimeError(
                f"{self.num_skipped_in_a_row} optimizer steps in a row had a loss or gradient that is not finite "
                f"(model.max_skipped_steps={self.max_skipped_steps}). Lower model.actor_lr, or look at the rewards and "
                "log-probs."
            )
