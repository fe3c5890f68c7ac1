"""Log-probs (and entropies) of given tokens from hidden states, without ever holding all logits.

Position in the flow: backbone -> hidden states of the wanted tokens -> **token_logprobs** -> losses.
Works through the tokens in chunks: a chunk's logits are made, reduced to a few numbers per token and dropped. The
backward pass needs them again. Logits of the first chunks are kept up to a fixed number of bytes, and only what lies
beyond that is computed a second time: a usual micro-batch pays nothing, and a large one stays within bounded memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_KEPT_LOGITS_BYTES = 512 * 2**20
"""Logits kept from forward to backward in one call."""

_CPU_BLOCK_BYTES = 4 * 2**20
"""Float32 logits handled at a time by elementwise work on a CPU, so that repeated passes hit its cache."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    chunk_size: int = 1024,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the log-prob of each target token under ``softmax(hidden @ weight.T / temperature)``.

    Matrix products run in the dtype of ``hidden`` (in the autocast dtype where autocast is on), everything after them
    in float32. Differentiable once, with respect to ``hidden`` and ``weight``.

    Args:
        hidden: ``[S, D]`` floating point, hidden states that predict the targets.
        weight: ``[V, D]`` floating point, LM head (possibly the tied embedding).
        targets: ``[S]`` int64, in [0, V).
        temperature: Divides the logits; above 0. Use the one the tokens were sampled with.
        chunk_size: Tokens whose logits exist at once.
        with_entropy: Also return the entropy of each distribution.

    Returns:
        ``[S]`` float32 log-probs in nats, or log-probs and entropies (nats), each ``[S]`` float32.

    Raises:
        ValueError: If shapes do not fit, ``temperature`` is not above 0 or ``chunk_size`` not at least 1.
    """
    _check(hidden, weight, targets, temperature, chunk_size)
    dtype = _compute_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        logprobs, entropies = _ChunkedLogprobs.apply(
            hidden, weight, targets, 1.0 / temperature, chunk_size, with_entropy, dtype
        )
    return (logprobs, entropies) if with_entropy else logprobs


@torch.no_grad()
def most_likely_tokens(hidden: Tensor, weight: Tensor, chunk_size: int = 1024) -> Tensor:
    """Return ``[S]`` int64, the token of the largest logit at each position; arguments as in `token_logprobs`."""
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    head = weight.to(dtype)
    return torch.cat([(chunk.to(dtype) @ head.T).argmax(-1) for chunk in hidden.split(chunk_size)])


@torch.no_grad()
def sum_pi_squared(hidden: Tensor, weight: Tensor, temperature: float = 1.0, chunk_size: int = 1024) -> Tensor:
    """Sum the squared probabilities of each token's distribution, within the memory of `token_logprobs`.

    It is the probability that two draws agree: 1 where the policy is certain, 1 / V where it is uniform. The optimal
    token baseline needs it.

    Args:
        hidden: As in `token_logprobs`.
        weight: As in `token_logprobs`.
        temperature: As in `token_logprobs`.
        chunk_size: As in `token_logprobs`.

    Returns:
        ``[S]`` float32 in (0, 1], without gradient.
    """
    _check(hidden, weight, hidden.new_empty(len(hidden)), temperature, chunk_size)
    dtype = _compute_dtype(hidden)
    head = weight.to(dtype)
    sums = hidden.new_empty(len(hidden), dtype=torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_size):
            logits = hidden[start : start + chunk_size].to(dtype) @ head.T  # [chunk, V]
            for block in _blocks(logits, start):
                x = logits[block.start - start : block.stop - start].float() * (1.0 / temperature)
                sums[block] = x.softmax(-1).square_().sum(-1)
    return sums


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probs and entropies with a hand-written gradient.

    With x the scaled logits, p = softmax(x), t the target and H the entropy of a token,
    ``d logprob / d x_j = [j = t] - p_j`` and ``d H / d x_j = -p_j (log p_j + H)``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        scale: float,
        chunk_size: int,
        with_entropy: bool,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        head = weight.to(dtype)
        log_normalizers = hidden.new_empty(len(hidden), dtype=torch.float32)
        logprobs = torch.empty_like(log_normalizers)
        entropies = torch.empty_like(log_normalizers) if with_entropy else None
        needs_backward = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        kept: list[Tensor] = []
        free_bytes = _KEPT_LOGITS_BYTES if needs_backward else 0
        for start in range(0, len(hidden), chunk_size):
            chunk = slice(start, start + chunk_size)
            logits = hidden[chunk].to(dtype) @ head.T  # [chunk, V]
            for block in _blocks(logits, start):
                inside = slice(block.start - start, block.stop - start)
                x = logits[inside].float()
                if scale != 1.0:
                    x = x * scale
                log_p = x.log_softmax(-1)
                target = targets[block, None]
                logprobs[block] = log_p.gather(-1, target)[:, 0]
                log_normalizers[block] = x.gather(-1, target)[:, 0] - logprobs[block]
                if entropies is not None:
                    entropies[block] = -(log_p.exp() * log_p).sum(-1)
            free_bytes -= logits.nbytes
            if free_bytes >= 0:
                kept.append(logits)
            del logits
        ctx.save_for_backward(hidden, head, targets, log_normalizers, entropies)
        ctx.kept, ctx.scale, ctx.chunk_size, ctx.weight_dtype = kept, scale, chunk_size, weight.dtype
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_grad: Tensor | None, entropy_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, targets, log_normalizers, entropies = ctx.saved_tensors
        if logprob_grad is None:
            if entropy_grad is None:
                return (None,) * 7
            logprob_grad = torch.zeros_like(entropy_grad)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        weight_grad = None
        for i, start in enumerate(range(0, len(hidden), ctx.chunk_size)):
            chunk = slice(start, min(start + ctx.chunk_size, len(hidden)))
            inputs = hidden[chunk].to(head.dtype)
            logits = ctx.kept[i] if i < len(ctx.kept) else inputs @ head.T
            for block in _blocks(logits, start):
                inside = slice(block.start - start, block.stop - start)
                logits[inside] = _logits_grad(
                    logits[inside],
                    targets[block],
                    log_normalizers[block],
                    logprob_grad[block],
                    None if entropy_grad is None else entropy_grad[block],
                    None if entropies is None else entropies[block],
                    ctx.scale,
                )
            if hidden_grad is not None:
                hidden_grad[chunk] = logits @ head
            if needs_weight:
                weight_grad = _accumulate(weight_grad, logits, inputs, len(hidden) > ctx.chunk_size)
            if i < len(ctx.kept):
                ctx.kept[i] = None
            del logits
        if needs_weight:
            weight_grad = torch.zeros_like(head) if weight_grad is None else weight_grad
            weight_grad = weight_grad.to(ctx.weight_dtype)
        return hidden_grad, weight_grad, None, None, None, None, None


def _logits_grad(
    logits: Tensor,
    targets: Tensor,
    log_normalizers: Tensor,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
    entropies: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the gradient with respect to raw logits of a block, ``[block, V]`` float32."""
    log_p = torch.mul(logits.float(), scale).sub_(log_normalizers[:, None])
    if entropy_grad is None or entropies is None:
        grad = log_p.exp_().mul_((logprob_grad * -scale)[:, None])
    else:
        factor = (log_p + entropies[:, None]).mul_(entropy_grad[:, None]).add_(logprob_grad[:, None]).mul_(-scale)
        grad = log_p.exp_().mul_(factor)
    return grad.scatter_add_(-1, targets[:, None], (logprob_grad * scale)[:, None])


def _accumulate(total: Tensor | None, logits_grad: Tensor, inputs: Tensor, has_more: bool) -> Tensor:
    """Add a chunk's share of the weight gradient; in float32 where there is more than one chunk."""
    if total is None:
        share = logits_grad.T @ inputs
        return share.float() if has_more else share
    if logits_grad.dtype == torch.float32:
        return total.addmm_(logits_grad.T, inputs)
    return total.add_(logits_grad.T @ inputs)


def _blocks(logits: Tensor, start: int) -> list[slice]:
    """Cut a chunk that begins at token ``start`` into rows for elementwise work; on a GPU it stays whole."""
    num_rows, vocab_size = logits.shape
    size = num_rows
    if logits.device.type == "cpu":
        size = math.ceil(_CPU_BLOCK_BYTES / (4 * vocab_size))
    return [slice(start + i, start + min(i + size, num_rows)) for i in range(0, num_rows, max(size, 1))]


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    """Dtype of the products with the head: autocast's where it is on."""
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_size: int) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "token_logprobs() needs hidden [S, D], weight [V, D] and targets [S], "
            f"got {tuple(hidden.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}."
        )
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0: greedy decoding has no log-probs to train on.")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1.")
