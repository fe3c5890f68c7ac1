"""Named full tensors out of whatever holds the policy: one device, DDP, FSDP2 or ZeRO-3.

Collecting is collective: every rank iterates to the end, and only the sender gets tensors. At most one bucket (or one
tensor larger than a bucket) is alive at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lit_rl.models.lora import WeightPart, weight_parts


def stream_weights(
    network: nn.Module, bucket_bytes: int, dtype: torch.dtype, *, is_sender: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the network's parameters in buckets of full tensors.

    Args:
        network: The Hugging Face model itself, so that names need no prefix stripped. Tied weights appear once, under
            their first name. Adapters are merged into the weights they belong to.
        bucket_bytes: Most bytes in a bucket, counted in ``dtype``; a larger tensor has a bucket of its own.
        dtype: What the receiver holds.
        is_sender: Whether this rank gets the tensors; the others get empty buckets but take part in gathering.

    Yields:
        Lists of ``(name, tensor)``, detached, contiguous, in ``dtype``; memory of their own only where a cast or a
        gather made it.
    """
    for bucket in _buckets(network, bucket_bytes, dtype):
        parameters = [parameter for part in bucket for parameter in part.parameters]
        with _gathered(parameters), torch.no_grad():
            full = []
            for part in bucket:
                tensor = part.merged(_whole)
                if is_sender:
                    # Under ZeRO-3 the gathered storage is taken back when the context ends, so the copy must be real.
                    full.append((part.name, tensor.to(dtype, copy=hasattr(part.weight, "ds_id")).contiguous()))
        yield full


def _whole(tensor: Tensor) -> Tensor:
    """A DTensor's full tensor, by an all-gather that every rank must enter; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _gathered(parameters: list[nn.Parameter]) -> Any:
    """Context in which ZeRO-3 partitions are whole; nothing for other strategies."""
    if not parameters or not hasattr(parameters[0], "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=None)


def _buckets(network: nn.Module, bucket_bytes: int, dtype: torch.dtype) -> Iterator[list[WeightPart]]:
    """Group weights, in order, so that each group stays within ``bucket_bytes``."""
    bucket: list[WeightPart] = []
    size = 0
    for part in weight_parts(network):
        # ZeRO-3 leaves an empty tensor behind; its true size is in ds_numel.
        num_bytes = int(getattr(part.weight, "ds_numel", part.weight.numel())) * dtype.itemsize
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += num_bytes
    if bucket:
        yield bucket
