"""Rewards changed by length before advantages are computed: DAPO's soft penalty on overlong responses."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(
    num_tokens: Tensor, *, max_response_tokens: int, overlong_buffer_tokens: int, penalty: float = 1.0
) -> Tensor:
    """Return what to add to each reward: 0 for short responses, falling linearly to ``-penalty`` at the limit.

    The fall begins at ``max_response_tokens - overlong_buffer_tokens`` tokens; beyond the limit the penalty stays.

    Args:
        num_tokens: ``[N]`` lengths of the responses, tokens.
        max_response_tokens: The limit, tokens.
        overlong_buffer_tokens: Length of the fall, tokens, in 1..max_response_tokens.
        penalty: Largest penalty, reward units, >= 0.

    Returns:
        ``[N]`` float32 (float64 for float64 lengths), in [-penalty, 0].

    Source: arXiv:2503.14476, eq. 13.
    """
    if not 1 <= overlong_buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"overlong_buffer_tokens={overlong_buffer_tokens} must lie between 1 and max_response_tokens="
            f"{max_response_tokens}. A fifth of the limit is usual."
        )
    if penalty < 0:
        raise ValueError(f"penalty={penalty} must be >= 0; it is subtracted from the reward.")
    lengths = num_tokens if num_tokens.is_floating_point() else num_tokens.float()
    excess = lengths - (max_response_tokens - overlong_buffer_tokens)
    return -penalty * (excess / overlong_buffer_tokens).clamp(0.0, 1.0)
