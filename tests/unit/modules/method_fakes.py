"""A micro-batch of given numbers, for the losses and advantages of modules that hold no network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def micro_batch(
    old: list[list[float]], advantages: list[float], mask: list[list[int]] | None = None, rollout: Any = None
) -> Any:
    """``[B, T]`` old (and, unless given, rollout) log-probs and one advantage per row."""
    old_logprobs = torch.tensor(old)
    return SimpleNamespace(
        old_logprobs=old_logprobs,
        rollout_logprobs=old_logprobs.clone() if rollout is None else torch.tensor(rollout),
        advantages=torch.tensor(advantages)[:, None].expand_as(old_logprobs),
        loss_mask=torch.ones_like(old_logprobs, dtype=torch.bool) if mask is None else torch.tensor(mask).bool(),
        positions=list(range(len(old))),
    )
