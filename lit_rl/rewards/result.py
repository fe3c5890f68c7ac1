"""What goes to a reward function and what comes back, as records and pure functions.

A failed score is a state (`RewardResult.error`), never a number: a zero would teach the policy that its answer was
wrong.
"""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_rl.types import Prompt, Trajectory

MAX_ERROR_CHARS = 4000
MAX_NOTE_CHARS = 1000


@dataclass(kw_only=True)
class ScoreRequest:
    """What a reward function may look at: the row, and the finished trajectory as text and counts.

    Attributes:
        row_id: Row of the dataset.
        data_source: Chooses the scorer.
        solution_str: The policy's tokens as text; tool and user tokens are not in it. Empty for an empty response.
        ground_truth: From the row.
        extra_info: Copy of the row's ``extra_info`` with ``prompt_messages`` (read only), ``num_turns``,
            ``stop_reason``, ``num_response_tokens``, and where the agent loop kept them ``messages``, ``media`` and
            ``rollout_reward_scores`` (its own numbers by name).
        num_response_tokens: Tokens after the prompt, tool tokens included.
    """

    row_id: str
    data_source: str
    solution_str: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    num_response_tokens: int = 0

    @classmethod
    def from_trajectory(cls, prompt: Prompt, trajectory: Trajectory) -> ScoreRequest:
        """Request for a finished trajectory whose ``text`` is set."""
        # A deep copy: samples of a group share the row, and reward functions like to write into extra_info.
        extra_info = copy.deepcopy(prompt.extra_info) if prompt.extra_info else {}
        extra_info["prompt_messages"] = prompt.messages
        extra_info["num_turns"] = trajectory.num_turns
        extra_info["stop_reason"] = trajectory.stop_reason
        extra_info["num_response_tokens"] = len(trajectory.response_ids)
        if trajectory.messages:
            extra_info["messages"] = trajectory.messages
        if trajectory.media:
            extra_info["media"] = trajectory.media
        if trajectory.reward_parts:
            extra_info["rollout_reward_scores"] = dict(trajectory.reward_parts)
        return cls(
            row_id=prompt.row_id,
            data_source=prompt.data_source,
            solution_str=trajectory.text,
            ground_truth=prompt.ground_truth,
            extra_info=extra_info,
            num_response_tokens=len(trajectory.response_ids),
        )


@dataclass(kw_only=True)
class RewardResult:
    """Outcome of scoring one trajectory.

    Attributes:
        score: Number the policy is trained on; ``None`` when scoring failed.
        parts: Further named numbers.
        notes: What else the function returned, as text, by name.
        error: Why scoring failed, with the traceback of user code; ``None`` when it did not.
        is_timeout: Whether it failed because its time ran out.
    """

    score: float | None
    parts: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    is_timeout: bool = False


class ScoreTimeout(TimeoutError):
    """Our limit ended the call, in contrast to a `TimeoutError` that a reward function raised itself."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no result within data.rewards.timeout_s={timeout_s:g} seconds")


def as_number(value: Any) -> float | None:
    """``value`` as a float if it is one number (Python, NumPy or tensor scalar, boolean), else ``None``."""
    if isinstance(value, (bool, int, float)):
        return float(value)
    # NumPy and torch scalars, without importing either: no dimensions, and an item of a plain type.
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        item = value.item()
        return float(item) if isinstance(item, (bool, int, float)) else None
    return None


def normalize_reward_return(value: Any, function_name: str, row_id: str) -> RewardResult:
    """Turn what a reward function returned into a result.

    A number is the score. A dict must have a number under ``score``; its other finite numbers become parts, which are
    averaged into metrics, and other values become notes, which are kept as text with the trajectory. A score that is
    anything else (text, list, ``None``, NaN) is an error naming function and row.

    Args:
        value: What the function returned.
        function_name: For the error message.
        row_id: For the error message.
    """
    parts: dict[str, float] = {}
    notes: dict[str, str] = {}
    shown = value
    if isinstance(value, Mapping):
        if "score" not in value:
            return RewardResult(
                score=None,
                error=f"Reward function {function_name}, row {row_id}: the returned dict has no key 'score', "
                f"only {sorted(map(str, value))[:20]}.",
            )
        shown = value["score"]
        for key, part in value.items():
            number = as_number(part)
            if key == "score":
                continue
            if number is not None and math.isfinite(number):
                parts[str(key)] = number
            else:
                notes[str(key)] = (part if isinstance(part, str) else repr(part))[:MAX_NOTE_CHARS]
    score = as_number(shown)
    if score is None or not math.isfinite(score):
        return RewardResult(
            score=None,
            error=f"Reward function {function_name}, row {row_id}: the score must be one finite number, "
            f"or a dict with it under 'score'; got {repr(shown)[:200]} of type {type(shown).__name__}.",
        )
    return RewardResult(score=score, parts=parts, notes=notes)


def merge_reward_parts(all_parts: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, int]]:
    """Mean and count of every key over the trajectories that have it.

    Args:
        all_parts: ``reward_parts`` of each trajectory; keys may differ.

    Returns:
        ``{key: (mean, count)}``, keys sorted. A trajectory without a key counts neither as 0 nor at all.
    """
    values: dict[str, list[float]] = {}
    for parts in all_parts:
        for key, number in parts.items():
            values.setdefault(key, []).append(number)
    return {key: (math.fsum(values[key]) / len(values[key]), len(values[key])) for key in sorted(values)}


def error_text(error: BaseException, max_chars: int = MAX_ERROR_CHARS) -> str:
    """Traceback of ``error``, its middle cut out where it is longer than ``max_chars``."""
    text = "".join(traceback.format_exception(error)).strip()
    if len(text) <= max_chars:
        return text
    # The last lines name the error, the first ones where it was called from; recursion fills the middle.
    head = max_chars // 4
    return f"{text[:head]}\n... ({len(text) - max_chars} characters left out) ...\n{text[head - max_chars :]}"
