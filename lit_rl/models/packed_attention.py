"""Attention over a packed row on a CPU: each segment by itself, so that little that is masked is computed.

Position in the flow: called by transformers in every layer, in the place of its ``sdpa`` attention.
A row of L tokens with a mask costs L squared, and PyTorch's CPU kernel is slow on short sequences: for one group of
four samples (425 tokens, 9 heads, bfloat16, one core) forward and backward of a layer take 23 ms there and 6 ms here.
Anything that is not a packed row on a CPU goes to ``sdpa`` unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lit_rl.models.packing import Segment

PACKED_ATTENTION = "lit_rl_packed"
"""Its name among transformers' attention implementations."""

_MAX_KEYS = 768
"""Longest segment whose probabilities are kept for the backward pass; beyond it they would outweigh all else."""


def use_packed_attention(network: PreTrainedModel) -> None:
    """Replace a network's ``sdpa`` attention by the one of this module; leave any other."""
    if network.config._attn_implementation == "sdpa":
        network.set_attn_implementation(PACKED_ATTENTION)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scaling: float) -> Tensor:
    """Attend within each part of a segment (causally) and from it to the segment's context (fully).

    Args:
        query: ``[1, H, L, D]``.
        key: ``[1, K, L, D]``, where K divides H.
        value: ``[1, K, L, D]``.
        segments: Cover the row without gaps, in order.
        scaling: Factor on the scores.

    Returns:
        ``[1, L, H, D]`` in the dtype of ``value``. Scores and softmax are float32, probabilities in that dtype.
    """
    if max(segment.num_keys for segment in segments) <= _MAX_KEYS:
        return _PackedAttention.apply(query, key, value, segments, scaling)
    outputs = []
    for segment in segments:
        keys, values = segment.select_keys(key, dim=2), segment.select_keys(value, dim=2)
        is_plain = segment.context is None and len(segment.parts) == 1
        # A boolean mask, since the kernel's own causal flag aligns at the first key, not at the last.
        mask = None if is_plain else _is_visible(segment.parts, segment.num_keys)
        queries = query[:, :, segment.start : segment.end]
        outputs.append(
            scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


class _PackedAttention(torch.autograd.Function):
    """Keeps the probabilities, which for short segments is faster than computing them again.

    With grouped heads the G query heads of one key head are stacked along the token axis: one product serves all.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], scaling: float
    ) -> Tensor:
        _, num_heads, length, head_dim = query.shape
        num_key_heads = key.shape[1]
        output = value.new_empty(1, length, num_heads, head_dim)
        all_probs = []
        for segment in segments:
            shape = (num_key_heads, -1, head_dim)
            queries = query[0, :, segment.start : segment.end].float().mul(scaling).reshape(shape)
            keys, values = segment.select_keys(key[0], dim=1), segment.select_keys(value[0], dim=1)  # [K, s, D]
            # In float32: rounding scores to bfloat16 would move the log-probs away from the engine's.
            scores = torch.bmm(queries, keys.float().transpose(1, 2))  # [K, G * t, s]
            scores.view(num_heads, segment.num_tokens, -1).add_(_bias(segment.parts, segment.num_keys))
            probs = scores.softmax(-1).to(value.dtype)
            attended = torch.bmm(probs, values).view(num_heads, segment.num_tokens, head_dim)
            output[0, segment.start : segment.end] = attended.transpose(0, 1)
            all_probs.append(probs)
        ctx.save_for_backward(query, key, value, *all_probs)
        ctx.segments, ctx.scaling = segments, scaling
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, output_grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *all_probs = ctx.saved_tensors
        query_grad = torch.empty_like(query)
        # Float32, since a shared prompt collects one summand from each response.
        key_grad = torch.zeros(key.shape[1:], dtype=torch.float32)
        value_grad = torch.zeros(value.shape[1:], dtype=torch.float32)
        for segment, probs in zip(ctx.segments, all_probs, strict=True):
            inside = slice(segment.start, segment.end)
            shape = (key.shape[1], -1, key.shape[3])
            grad = output_grad[0, inside].transpose(0, 1).reshape(shape)  # [K, G * t, D]
            keys, values = segment.select_keys(key[0], dim=1), segment.select_keys(value[0], dim=1)
            segment.add_to_keys(value_grad, torch.bmm(probs.transpose(1, 2), grad), dim=1)
            probs_grad = torch.bmm(grad, values.transpose(1, 2))
            scores_grad = torch.ops.aten._softmax_backward_data(probs_grad, probs, -1, probs.dtype).mul_(ctx.scaling)
            queries = query[0, :, inside].reshape(shape)
            query_grad[0, :, inside] = torch.bmm(scores_grad, keys).view(query.shape[1], -1, query.shape[3])
            segment.add_to_keys(key_grad, torch.bmm(scores_grad.transpose(1, 2), queries), dim=1)
        return query_grad, key_grad.to(key.dtype)[None], value_grad.to(value.dtype)[None], None, None


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed_segments: Sequence[Segment] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Serve transformers; ``packed_segments`` is what the caller handed to the network's forward."""
    if packed_segments is None:
        if attention_mask is not None and attention_mask.numel() == 0:
            raise ValueError(
                f"{type(module).__name__} does not get the keyword arguments of its network, so that packed rows would "
                "be mixed up. Load the model with attn_implementation='eager'."
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        return packed_attention(query, key, value, packed_segments, scaling), None


@lru_cache(maxsize=256)
def _bias(parts: tuple[int, ...], num_keys: int) -> Tensor:
    """What is added to scores, ``[t, s]`` float32: minus infinity where a query may not see a key."""
    return torch.zeros(sum(parts), num_keys).masked_fill_(~_is_visible(parts, num_keys), float("-inf"))


def _is_visible(parts: tuple[int, ...], num_keys: int) -> Tensor:
    """Which keys a segment's queries see, ``[t, s]`` bool: all of the context, and what came before in their part."""
    num_queries = sum(parts)
    visible = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    visible[:, : num_keys - num_queries] = True
    start = 0
    for length in parts:
        first_key = num_keys - num_queries + start
        visible[start : start + length, first_key : first_key + length] = True
        visible[start : start + length, first_key : first_key + length].tril_()
        start += length
    return visible


AttentionInterface.register(PACKED_ATTENTION, _attention_forward)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
