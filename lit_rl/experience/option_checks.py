"""Ranges of the options of a rollout, checked before anything starts; what they mean is said at the DataModule."""

from __future__ import annotations

from lit_rl.types import SamplingParams


def check_sampling(sampling: SamplingParams, name: str) -> None:
    """Refuse sampling options out of range.

    Args:
        sampling: The options.
        name: Their option below ``data``.

    Raises:
        ValueError: Naming option, value and rule.
    """
    for is_valid, option, rule in (
        (sampling.temperature >= 0, "temperature", "0 (greedy) or above"),
        (0 < sampling.top_p <= 1, "top_p", "in (0, 1]"),
        (sampling.top_k >= -1, "top_k", "at least 1, or -1 (all)"),
        (sampling.repetition_penalty > 0, "repetition_penalty", "above 0"),
    ):
        if not is_valid:
            raise ValueError(f"data.{name}.{option}={getattr(sampling, option)} must be {rule}.")


def check_at_least(limit: int, **options: int | None) -> None:
    """Refuse whole numbers below a limit; ``None`` passes.

    Args:
        limit: Smallest value allowed.
        **options: Values by their option below ``data``.

    Raises:
        ValueError: Naming option, value and rule.
    """
    for name, value in options.items():
        if value is not None and value < limit:
            raise ValueError(f"data.{name}={value} must be at least {limit}.")
