"""Which trajectories are learnt from, and how often: PF-PPO's resampling by reward."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_rewards

FILTRATION_METHODS = ("pow", "max-min", "max-random")


@torch.no_grad()
def filtration_weights(rewards: Tensor, *, method: str = "pow", power: float = 2.0) -> Tensor:
    """Return how likely each trajectory is to be drawn, ``[N]`` float64 that adds up to 1.

    - ``pow``: proportional to ``|R|^power``: rewards far from 0 are the reliable ones of a reward model.
    - ``max-min``: only the highest and the lowest reward, alike.
    - ``max-random``: the highest reward four times as likely as any other.

    Where every weight would be 0 (all rewards 0), all are alike.

    Args:
        rewards: ``[N]`` float, finite, over all ranks.
        method: One of the above.
        power: Exponent of ``pow``, at least 0.

    Source: arXiv:2409.06957 (PF-PPO).
    """
    check_rewards(rewards)
    if method not in FILTRATION_METHODS:
        raise ValueError(f"method={method!r} is unknown. Choose one of {', '.join(FILTRATION_METHODS)}.")
    if power < 0:
        raise ValueError(f"power={power} must be at least 0; 0 draws all trajectories alike.")
    values = rewards.double()
    if not len(values):
        return values
    if method == "pow":
        weights = values.abs().pow(power)
    elif method == "max-min":
        weights = ((values == values.max()) | (values == values.min())).double()
    else:
        weights = torch.where(values == values.max(), 0.4, 0.1).double()
    return weights / weights.sum() if bool(weights.any()) else torch.full_like(values, 1 / len(values))


@torch.no_grad()
def draw_counts(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``[N]`` int64: how often each trajectory is among N draws with replacement.

    Args:
        weights: ``[N]`` float64 from `filtration_weights`.
        generator: Of the CPU; the same state gives the same counts on every rank.
    """
    if not len(weights):
        return torch.zeros(0, dtype=torch.int64)
    drawn = torch.multinomial(weights, len(weights), replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(weights))
