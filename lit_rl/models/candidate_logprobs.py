"""Log-probs of several candidate tokens per position, for losses against a teacher's most likely tokens.

Position in the flow: as `token_logprobs`, which has one token per position and a backward pass written by hand. Here
autograd recomputes each chunk's logits, so that only one chunk's exist at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def candidate_logprobs(
    hidden: Tensor, weight: Tensor, candidate_ids: Tensor, temperature: float = 1.0, chunk_size: int = 1024
) -> Tensor:
    """Compute the log-probs of candidates under ``softmax(hidden @ weight.T / temperature)``.

    The matrix product runs in the dtype of ``hidden`` (in the autocast dtype where autocast is on), the rest in
    float32. Differentiable with respect to ``hidden`` and ``weight``.

    Args:
        hidden: ``[S, D]`` floating point.
        weight: ``[V, D]`` floating point, LM head.
        candidate_ids: ``[S, K]`` int64, in [0, V).
        temperature: Divides the logits; above 0.
        chunk_size: Positions whose logits exist at once.

    Returns:
        ``[S, K]`` float32, nats.
    """
    if candidate_ids.ndim != 2 or candidate_ids.shape[0] != hidden.shape[0]:
        raise ValueError(
            "candidate_logprobs() needs hidden [S, D] and candidate_ids [S, K], "
            f"got {tuple(hidden.shape)} and {tuple(candidate_ids.shape)}."
        )
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype

    def of_chunk(hidden_chunk: Tensor, head: Tensor, ids: Tensor) -> Tensor:
        logits = (hidden_chunk @ head.T).float() / temperature  # [chunk, V]
        return logits.gather(-1, ids) - logits.logsumexp(-1, keepdim=True)

    with torch.autocast(device_type, enabled=False):
        low, head = hidden.to(dtype), weight.to(dtype)
        chunks = [
            checkpoint(of_chunk, low[start : start + chunk_size], head, candidate_ids[start : start + chunk_size],
                       use_reentrant=False)
            for start in range(0, max(1, len(low)), chunk_size)
        ]  # fmt: skip
    return torch.cat(chunks)
