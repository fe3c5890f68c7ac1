"""Scorer of the generated task ``arithmetic``: is the last integer of the answer the right one?"""

from __future__ import annotations

from typing import Any

from lit_rl.data.arithmetic import is_complete, is_well_formed, parse_answer


def compute_score(
    solution_str: str, ground_truth: int | str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Score one answer.

    Args:
        solution_str: The answer, any text.
        ground_truth: The right integer.
        extra_info: Not used.

    Returns:
        ``score`` and ``acc``: 1.0 where the last integer in the answer equals ``ground_truth``, else 0.0.
        ``well_formed``: 1.0 where the answer has the demanded form, right or wrong. It is logged, not rewarded.
        ``complete``: the same for a number alone or a sum written out to its end, which more answers are.
        ``acc_if_well_formed``, ``acc_if_complete``: as ``acc``, there only where the answer has that form: their means
        tell arithmetic from formatting.
    """
    accuracy = float(parse_answer(solution_str) == int(ground_truth))
    result = {"score": accuracy, "acc": accuracy}
    for form, has_form in {"well_formed": is_well_formed(solution_str), "complete": is_complete(solution_str)}.items():
        result[form] = float(has_form)
        if has_form:
            result[f"acc_if_{form}"] = accuracy
    return result
