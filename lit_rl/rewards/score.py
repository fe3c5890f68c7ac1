"""The default reward: the scorer that belongs to a row's ``data_source``.

Each scorer is a module of this package with a function ``compute_score(solution_str, ground_truth, extra_info)``; it is
imported when it is first needed. Own functions are configured with ``data.rewards.function`` and never come here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

# verl's names, and the generated task. A name that ends in * stands for all that begin so.
_SCORERS = {
    "arithmetic": "arithmetic",
    "openai/gsm8k": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "numina_*": "math",
    "math": "math_dapo",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "aime*": "math_dapo",
    "hiyouga/geometry3k": "geo3k",
    "multiple_choice": "multiple_choice",
    "searchR1_*": "search_r1_em",
    "reasoning_gym/*": "reasoning_gym",
    "codecontests": "code_tests",
    "apps": "code_tests",
    "codeforces": "code_tests",
    "taco": "code_tests",
    "code_tests": "code_tests",
}


@functools.cache
def scorer_module(data_source: str) -> str | None:
    """Module that scores ``data_source``, or ``None``."""
    for name, module in _SCORERS.items():
        if data_source == name or (name.endswith("*") and data_source.startswith(name[:-1])):
            return f"lit_rl.rewards.{module}"
    return None


def has_scorer(data_source: str) -> bool:
    """Whether `compute_score` knows ``data_source``."""
    return scorer_module(data_source) is not None


def check_data_sources(data_sources: Iterable[str]) -> None:
    """Raise ``ValueError`` naming every source without a scorer; called when data is loaded."""
    unknown = sorted({source for source in data_sources if not has_scorer(source)})
    if unknown:
        raise ValueError(_unknown_message(unknown))


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float | dict[str, Any]:
    """Score one response with the scorer of its ``data_source``.

    Args:
        data_source: Chooses the scorer.
        solution_str: The response as text.
        ground_truth: What the scorer compares with.
        extra_info: Passed on to the scorer.

    Returns:
        A number, or a dict with the number under ``score`` and further named numbers.

    Raises:
        ValueError: If no scorer belongs to ``data_source``.
    """
    module = scorer_module(data_source)
    if module is None:
        raise ValueError(_unknown_message([data_source]))
    return _scorer(module)(solution_str, ground_truth, extra_info)


@functools.cache
def _scorer(module: str) -> Callable[..., float | dict[str, Any]]:
    return importlib.import_module(module).compute_score


def _unknown_message(unknown: list[str]) -> str:
    return (
        f"No scorer for data_source {', '.join(map(repr, unknown))}. Known: {', '.join(sorted(_SCORERS))}. "
        "Set data.rewards.function to your own function, or correct the column data_source."
    )
