"""GDPO: several rewards, each normalised within its group before they are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.advantages.group_relative import group_relative
from lit_rl.algorithms.advantages.whiten import masked_mean_and_std
from lit_rl.algorithms.checks import check_same_shape


def decoupled_group_relative(
    reward_parts: dict[str, Tensor], group_ids: Tensor, num_tokens: Tensor, *, weights: dict[str, float] | None = None
) -> Tensor:
    """Return the weighted sum of group-relative advantages per reward, whitened over the tokens of the batch.

    Normalising before adding keeps a reward of small spread from drowning in one of large spread.

    Args:
        reward_parts: One ``[N]`` float tensor per reward, over all ranks.
        group_ids: ``[N]`` int64.
        num_tokens: ``[N]`` loss tokens of each sequence.
        weights: Weight by reward name; ``None`` is 1 for each. Must name exactly the rewards given.

    Returns:
        ``[N]`` advantages of the first reward's dtype.

    Source: arXiv:2601.05242 (GDPO).
    """
    weights = dict.fromkeys(reward_parts, 1.0) if weights is None else weights
    if not reward_parts or set(weights) != set(reward_parts):
        raise ValueError(
            f"weights names {sorted(weights)} and reward_parts {sorted(reward_parts)}; they must name the same "
            "rewards, at least one. Add the missing key to the scorer's result or take it out of the weights."
        )
    check_same_shape(group_ids=group_ids, num_tokens=num_tokens, **reward_parts)
    dtype = next(iter(reward_parts.values())).dtype
    normalised = {name: group_relative(part.double(), group_ids) for name, part in reward_parts.items()}
    total = torch.stack([weights[name] * advantages for name, advantages in normalised.items()]).sum(0)
    mean, std = masked_mean_and_std(total, num_tokens > 0, num_tokens)
    return ((total - mean) * torch.rsqrt(std.square() + 1e-8)).to(dtype)
