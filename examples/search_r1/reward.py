"""Reward of a searching policy: exact match, a little for the form, a little less for searches that were not needed.

Position in the flow: finished trajectory -> **compute_score** -> advantage. Exact match and the penalty for tag spam
are `lit_rl.rewards.search_r1_em`'s; only the policy's own text is judged. The form is right when at least one search
was called readably and the last message is one closed answer and nothing else: a looser rule pays half-trained models
for ``<answer><tool_call>...``.

Without a price a policy that has learned to search twice does so everywhere. Only right answers pay it, and not for
their first search: while hardly any answer is right, a price for every search makes the groups without a right answer
teach one thing, not to search.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lit_rl.rewards import search_r1_em

_WHOLE_ANSWER = re.compile(r"\s*<answer>((?!</?answer>|</?tool_call>).)+</answer>\s*", re.DOTALL)
_NO_TOOL = "no_tool"


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Mapping[str, Any],
    format_score: float = 0.1,
    search_price: float = 0.0,
) -> dict[str, float]:
    """Score one trajectory.

    Args:
        data_source: Ends in ``no_tool`` where the answer was asked for at once: then the whole text is the answer.
        solution_str: The policy's own text.
        ground_truth: ``{"target": [answers]}``.
        extra_info: Of the row, with the conversation's ``messages``.
        format_score: Added where the form is right.
        search_price: Taken from a right answer for each search after the first.

    Returns:
        ``score``, and for the log ``em``, ``contains``, ``format`` (each 0 or 1) and ``searches``.
    """
    targets = ground_truth["target"]
    if data_source.endswith(_NO_TOOL):
        em = float(search_r1_em.em_check(solution_str, targets))
        return {"score": em, "em": em, "contains": float(search_r1_em.subem_check(solution_str, targets))}
    messages = [message for message in extra_info.get("messages") or [] if message["role"] == "assistant"]
    num_searches = sum(len(message.get("tool_calls") or []) for message in messages[:-1])
    last = str(messages[-1].get("content") or "") if messages else ""
    has_form = num_searches > 0 and not messages[-1].get("tool_calls") and _WHOLE_ANSWER.fullmatch(last) is not None
    em = search_r1_em.compute_score(solution_str, ground_truth)
    return {
        "score": em + format_score * has_form - search_price * max(0, num_searches - 1) * (em > 0),
        "em": float(em > 0),
        "contains": float(search_r1_em.subem_check(solution_str, targets)),
        "format": float(has_form),
        "searches": float(num_searches),
    }
