"""Tasks of the package ``reasoning-gym``, each scored by the rule of its own generator.

Rows come from `lit_rl.data.ReasoningGym`, which puts the ``task`` and the generated ``entry`` into ``extra_info``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lit_rl.rewards.search_r1_em import extract_solution


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> dict[str, float]:
    """Score one response.

    Args:
        solution_str: The response. The answer is its last ``<answer>`` block, or without one the whole text.
        ground_truth: Not used: the entry holds it, and some tasks have several right answers.
        extra_info: The row's, with ``task`` and ``entry``.

    Returns:
        ``score`` in [0, 1], as the task grades it, and ``acc``: 1.0 where the score is 1.

    Raises:
        ValueError: If ``extra_info`` lacks them.
        ModuleNotFoundError: If ``reasoning-gym`` is not installed.
    """
    extra_info = extra_info or {}
    if not extra_info.get("task") or not extra_info.get("entry"):
        raise ValueError(
            "extra_info needs 'task' and 'entry' of reasoning-gym; rows of lit_rl.data.ReasoningGym have them. "
            f"Keys present: {sorted(extra_info)}."
        )
    answer = extract_solution(solution_str)
    if answer is None:
        answer = solution_str.strip()
    score = float(_score_function(extra_info["task"])(answer=answer, entry=extra_info["entry"]))
    return {"score": score, "acc": float(score >= 1.0)}


@functools.cache
def _score_function(task: str) -> Callable[..., float]:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)
