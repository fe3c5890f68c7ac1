"""A generative judge: a language model reads question, reference and response, and writes a grade.

Use: ``data.rewards.function: lit_rl.rewards.judge:compute_score`` with ``kwargs: {model: NAME}``, where NAME is one of
``data.rewards.models``, or with ``kwargs: {base_url: ..., model: ...}`` for a server started elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lit_rl.rewards.reward_server import RewardServerError, post_json

if TYPE_CHECKING:
    from lit_rl.rewards.served_models import ServedRewardModel

PROMPT = """Grade the response to the question. The reference answer is right.

Question:
{question}

Reference answer:
{ground_truth}

Response:
{response}

Think briefly, then end with one line "Grade: N", where N is a number from 0 (wrong) to 10 (right and complete)."""

_SHOWN_CHARS = 200


async def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    model: str,
    base_url: str | None = None,
    models: Mapping[str, ServedRewardModel] | None = None,
    prompt: str = PROMPT,
    pattern: str = r"Grade:\s*(-?\d+(?:\.\d+)?)",
    best_grade: float = 10.0,
    max_tokens: int = 512,
    timeout_s: float = 50.0,
    api_key_variable: str | None = None,
) -> dict[str, float]:
    """Score one response.

    Args:
        solution_str: The response.
        ground_truth: The reference answer.
        extra_info: With ``prompt_messages``; the question is the last user message among them.
        model: Name of the judge among ``models``, or on the server.
        base_url: Of an OpenAI-compatible server, up to and including ``/v1``; ``None``: the run serves the judge.
        models: Reward models of the run, given by the reward worker.
        prompt: What the judge reads, with ``{question}``, ``{ground_truth}`` and ``{response}``.
        pattern: Regular expression whose first group is the grade; the last match counts, so that a grade that the
            response itself contains does not.
        best_grade: The grade that gives a score of 1.
        max_tokens: Longest judgement, tokens.
        timeout_s: For all attempts; keep it below ``data.rewards.timeout_s``.
        api_key_variable: Environment variable with a bearer token.

    Returns:
        ``score``: grade through ``best_grade``, in [0, 1].

    Raises:
        RewardServerError: If there is no judgement, or no grade in it.
    """
    fields = {
        "question": _question(extra_info),
        "ground_truth": str(ground_truth),
        "response": solution_str,
    }
    # In one pass: a response that contains "{question}" stays as it is.
    text = re.sub(r"\{(question|ground_truth|response)\}", lambda found: fields[found[1]], prompt)
    messages = [{"role": "user", "content": text}]
    if base_url is None:
        where = f"Judge {model}"
        judgement = await (models or {})[model].generate(messages, max_tokens=max_tokens)
    else:
        where = base_url.rstrip("/") + "/chat/completions"
        body = {"model": model, "messages": messages, "temperature": 0.0, "max_tokens": max_tokens}
        reply = await post_json(where, body, timeout_s=timeout_s, api_key_variable=api_key_variable)
        try:
            judgement = str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError) as error:
            raise RewardServerError(f"{where}: the answer has no choices[0].message.content.") from error
    grades = re.findall(pattern, judgement)
    if not grades:
        raise RewardServerError(f"{where}: the judgement has no grade: {judgement[-_SHOWN_CHARS:]!r}")
    return {"score": min(max(float(grades[-1]) / best_grade, 0.0), 1.0)}


def _question(extra_info: dict[str, Any]) -> str:
    asked = [message for message in extra_info.get("prompt_messages", ()) if message.get("role") == "user"]
    return str(asked[-1]["content"]) if asked else ""
