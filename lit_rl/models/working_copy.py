"""A bfloat16 copy of a network that computes while the registered float32 parameters learn.

Position in the flow: forward, backward on the **copy** -> gradients added to the float32 parameters -> step -> refresh.
Autocast would cast every weight on every call, which costs a CPU as much as a small micro-batch. The copy is cast once
per optimizer step, and gradients of successive micro-batches are summed in float32.
Only for one process on a CPU: a strategy that synchronises gradients does not see the copy's.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook


class Bf16WorkingCopy:
    """A copy of a network in bfloat16, with nothing to call by hand.

    Not a module, so that it is never registered, saved or moved. It is refreshed on access after an optimizer step and
    after any other in-place change of the float32 parameters, such as loading a checkpoint. Its gradients move to the
    ``.grad`` of the float32 parameters as soon as autograd has finished each of them. Costs 2 bytes per parameter.

    Args:
        network: A network with float32 parameters. Tied parameters stay tied and frozen ones frozen; buffers keep their
            dtype.
    """

    def __init__(self, network: nn.Module) -> None:
        self._master = network
        # Handing deepcopy the parameters keeps ties, spares a float32 copy, and leaves float32 buffers (rotary) alone.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(p.detach().to(torch.bfloat16), requires_grad=p.requires_grad)
            for p in network.parameters()
        }
        self._copy: nn.Module = copy.deepcopy(network, memo)
        self._seen = self._master_versions()
        self._stale = False
        for master, low in zip(network.parameters(), self._copy.parameters(), strict=True):
            if low.requires_grad:
                low.register_post_accumulate_grad_hook(_move_gradient_to(master))
        self._watch_optimizers()

    @property
    def network(self) -> nn.Module:
        """The copy, equal to the float32 parameters rounded to bfloat16."""
        if self._stale or self._seen != self._master_versions():
            self.refresh()
        return self._copy

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the float32 parameters into the copy."""
        masters, copies = self._master.parameters(), self._copy.parameters()
        for master, low, version in zip(masters, copies, self._seen, strict=True):
            # Optimizers leave what is frozen alone (all but the adapters, with LoRA).
            if master.requires_grad or master._version != version:
                low.copy_(master)
        self._stale = False
        self._seen = self._master_versions()

    def _master_versions(self) -> list[int]:
        # An in-place change raises a tensor's version counter.
        return [p._version for p in self._master.parameters()]

    def _watch_optimizers(self) -> None:
        # A fused optimizer does not raise the counters of its parameters (torch 2.13).
        this = weakref.ref(self)

        def mark_stale(*_: Any) -> None:
            working_copy = this()
            if working_copy is not None:
                working_copy._stale = True

        weakref.finalize(self, register_optimizer_step_post_hook(mark_stale).remove)


def _move_gradient_to(master: nn.Parameter) -> Callable[[Tensor], None]:
    """Return a hook that adds the copy's gradient to ``master.grad``, in float32, and frees it."""

    def move(low: Tensor) -> None:
        assert low.grad is not None
        if master.grad is None:
            master.grad = low.grad.float()
        else:
            master.grad.add_(low.grad)
        low.grad = None

    return move
