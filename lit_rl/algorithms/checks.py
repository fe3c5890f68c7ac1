"""Refuse bad arguments with a message that names the argument and the fix.

Used at the border of every public function of this package. Shape, dtype and mode checks cost nothing; finiteness is
checked only for the global scalars (rewards), which live on the CPU, never for ``[B, T]`` tensors, where it would
stall a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_same_shape(**tensors: Tensor) -> None:
    """Raise ``ValueError`` unless all tensors, given by argument name, have the same shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"Shapes differ: {listing}. Pass tensors of one shape; pad all of them to the same length.")


def check_mask(mask: Tensor, name: str = "mask") -> None:
    """Raise ``ValueError`` unless the mask is boolean: a float mask would silently become a weight."""
    if mask.dtype is not torch.bool:
        raise ValueError(f"{name} has dtype {mask.dtype}; it must be torch.bool. Pass {name}.bool().")


def check_advantages(advantages: Tensor, logprobs: Tensor) -> None:
    """Raise ``ValueError`` unless the advantages are ``[B, 1]`` or ``[B, T]`` for log-probs of ``[B, T]``."""
    allowed = ((logprobs.shape[0], 1), tuple(logprobs.shape))
    if logprobs.dim() != 2 or tuple(advantages.shape) not in allowed:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}; with logprobs of shape {tuple(logprobs.shape)} it must "
            "be [B, 1] (one per sequence: advantages.unsqueeze(1)) or [B, T] (one per token)."
        )


def check_rewards(rewards: Tensor, name: str = "rewards") -> None:
    """Raise ``ValueError`` unless the tensor is floating point and finite."""
    if not rewards.is_floating_point():
        raise ValueError(f"{name} has dtype {rewards.dtype}; it must be floating point. Pass {name}.float().")
    is_finite = torch.isfinite(rewards)
    if not bool(is_finite.all()):
        positions = (~is_finite).flatten().nonzero().flatten()[:5].tolist()
        raise ValueError(
            f"{name} holds NaN or infinity at flat positions {positions}. "
            "Return a finite reward, or mark the trajectory failed, so that it is left out."
        )


def check_grouped(rewards: Tensor, group_ids: Tensor) -> None:
    """Raise ``ValueError`` unless rewards are finite ``[N]`` floats and group ids ``[N]`` integers."""
    check_rewards(rewards)
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [N], one scalar per sequence.")
    check_same_shape(rewards=rewards, group_ids=group_ids)
    if group_ids.is_floating_point() or group_ids.dtype is torch.bool:
        raise ValueError(f"group_ids has dtype {group_ids.dtype}; it must be an integer dtype such as torch.int64.")


def check_in_range(name: str, value: float, low: float, high: float) -> None:
    """Raise ``ValueError`` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is outside [{low}, {high}]. Set it within that range.")
