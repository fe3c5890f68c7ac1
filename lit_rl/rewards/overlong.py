"""DAPO's soft punishment of responses that nearly run into the token limit. Source: arXiv:2503.14476, eq. 13."""

from __future__ import annotations


def overlong_penalty(
    num_response_tokens: int, *, max_response_tokens: int, buffer_tokens: int, penalty_factor: float = 1.0
) -> float:
    """Return what is added to the score: 0 up to the buffer, then linear down to minus ``penalty_factor`` at the limit.

    Args:
        num_response_tokens: Length of the response, tokens.
        max_response_tokens: The limit, tokens.
        buffer_tokens: Length of the stretch before the limit in which the penalty grows, tokens, in (0, limit].
        penalty_factor: Penalty at the limit, reward units, at least 0.

    Raises:
        ValueError: If ``buffer_tokens`` is out of its range.
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ValueError(
            f"overlong buffer of {buffer_tokens} tokens: it must be at least 1 "
            f"and at most max_response_tokens={max_response_tokens}."
        )
    excess = num_response_tokens - (max_response_tokens - buffer_tokens)
    return min(0.0, -excess / buffer_tokens * penalty_factor)
