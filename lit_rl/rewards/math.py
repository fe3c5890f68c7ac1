r"""MATH: the content of the last ``\boxed{}``."""

from __future__ import annotations

from typing import Any

from lit_rl.data.latex_answers import are_equal, last_boxed


def compute_score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    r"""Score one response.

    Args:
        solution_str: The response.
        ground_truth: The right answer, or a solution with the right answer in ``\boxed{}``.
        extra_info: Not used.

    Returns:
        1.0 if the boxed answer is mathematically equal, else 0.0.
    """
    answer = last_boxed(solution_str)
    if answer is None:
        return 0.0
    golden = str(ground_truth)
    return float(are_equal(answer, last_boxed(golden) or golden))
