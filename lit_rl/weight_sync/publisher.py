"""What the DataModule asks of the trainer's callbacks: that one of them brings the weights into the replicas."""

from __future__ import annotations


class WeightPublisher:
    """Marks a callback that syncs weights; `lit_rl.callbacks.WeightSync` is one."""
