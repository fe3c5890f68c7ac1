"""GSM8K: the number after the last ``####``."""

from __future__ import annotations

import re
from typing import Any, Literal

# Long reasoning is not searched: the answer stands at the end.
_TAIL_CHARS = 300
_STRICT = re.compile(r"####\s*\$?\s*(-?\$?[0-9][0-9.,]*)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")


def extract_solution(solution_str: str, method: Literal["strict", "flexible"] = "strict") -> str | None:
    """Return the answer as text, without ``,``, ``$`` and a final full stop; ``None`` without one.

    Args:
        solution_str: The response.
        method: ``strict`` wants ``#### NUMBER``; ``flexible`` takes the last number.
    """
    found = (_STRICT if method == "strict" else _NUMBER).findall(solution_str[-_TAIL_CHARS:])
    return _clean(found[-1]) if found else None


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score one response by equality of the number's text.

    Args:
        solution_str: The response.
        ground_truth: The right number, text or int.
        extra_info: Not used.
        method: See `extract_solution`.
        format_score: For an answer that is wrong.
        score: For an answer that is right.

    Returns:
        0.0 without an answer, else as above.
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == _clean(str(ground_truth)) else format_score


def _clean(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "").rstrip(".")
