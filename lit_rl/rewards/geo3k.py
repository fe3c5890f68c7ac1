r"""Geometry3K: a boxed answer after reasoning in ``<think>``, nine tenths for the answer and one for the form."""

from __future__ import annotations

import re
from typing import Any

from lit_rl.data.latex_answers import are_equal, last_boxed

_FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    r"""Score one response.

    Args:
        solution_str: The response.
        ground_truth: The right answer.
        extra_info: Not used.

    Returns:
        ``score`` = 0.9 ``acc`` + 0.1 ``format``, each part 0.0 or 1.0.
    """
    answer = last_boxed(solution_str)
    accuracy = float(answer is not None and are_equal(answer, str(ground_truth)))
    is_formed = float(_FORMAT.fullmatch(solution_str.strip()) is not None)
    return {"score": 0.9 * accuracy + 0.1 * is_formed, "acc": accuracy, "format": is_formed}
