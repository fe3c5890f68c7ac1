"""Reward of a calculating policy: the problem's own grade, and a little for a call followed by one closed answer.

Without any of the second, a half warmed-up policy has nothing to climb while its answers are still wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lit_rl.rewards import reasoning_gym

_WHOLE_ANSWER = re.compile(r"\s*<answer>[^<>]+</answer>\s*")


def compute_score(
    solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any], format_score: float = 0.1
) -> dict[str, float]:
    """Score one trajectory: ``score``, and for the log ``acc`` and ``format``."""
    messages = [message for message in extra_info.get("messages") or [] if message["role"] == "assistant"]
    has_called = any(message.get("tool_calls") for message in messages[:-1])
    last = str(messages[-1].get("content") or "") if messages else ""
    has_form = has_called and not messages[-1].get("tool_calls") and _WHOLE_ANSWER.fullmatch(last) is not None
    graded = reasoning_gym.compute_score(solution_str, ground_truth, dict(extra_info))
    # The task grades near misses with a little; only right answers count here.
    return {"score": graded["acc"] + format_score * has_form, "acc": graded["acc"], "format": float(has_form)}
