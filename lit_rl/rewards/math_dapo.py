r"""DAPO's mathematics: the last line ``Answer: ...``, or a ``\boxed{}`` at the very end."""

from __future__ import annotations

import re
from typing import Any

from lit_rl.data.latex_answers import are_equal, last_boxed

_TAIL_CHARS = 300
_BOXED_TAIL_CHARS = 100
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


def compute_score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    r"""Score one response.

    Args:
        solution_str: The response.
        ground_truth: The right answer.
        extra_info: Not used.

    Returns:
        ``score`` 1.0 or -1.0, ``acc`` 1.0 or 0.0, and ``pred``, the answer that was found (empty without one).
    """
    lines = _ANSWER.findall(solution_str[-_TAIL_CHARS:])
    # Without an answer line a boxed answer counts only where it is the end of the text.
    prediction = (last_boxed(lines[-1]) or lines[-1]) if lines else last_boxed(solution_str[-_BOXED_TAIL_CHARS:])
    is_right = prediction is not None and are_equal(prediction.strip(), str(ground_truth))
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right), "pred": (prediction or "").strip()}
