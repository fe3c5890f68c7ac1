"""A callback that keeps what every iteration of a fit did."""

from __future__ import annotations

import torch
from lightning.pytorch.callbacks import Callback


class IterationRecorder(Callback):
    """Keeps what each iteration logged, its weights at the end, and every gradient that was stepped with."""

    def __init__(self):
        self.metrics = []
        self.weights = []
        self.gradients = []

    def on_train_start(self, trainer, module):
        self.start = weights_of(module)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients.append({name: p.grad.clone() for name, p in module.actor.named_parameters()})

    def on_train_epoch_end(self, trainer, module):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.weights.append(weights_of(module))

    def of(self, name):
        """One logged number, by iteration."""
        return [metrics.get(name) for metrics in self.metrics]


def weights_of(module):
    return {name: p.detach().clone() for name, p in module.actor.named_parameters()}


def are_equal(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)
