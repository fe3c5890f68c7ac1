r"""Multiple choice: the last letter that the response commits to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from lit_rl.data.latex_answers import last_boxed

# From the most to the least explicit; the last match of the first form that occurs counts.
_FORMS = (
    re.compile(r"<answer>\s*\(?([A-Z])\b[^<]*</answer>", re.IGNORECASE),
    re.compile(r"(?i:answer|choice|option)\s*(?i:is|:)?\s*:?\s*\**\s*\(?([A-Z])\)?(?![\w'’])"),
    re.compile(r"(?m)^\s*\(?([A-Z])\)?[.:)]?\s*$"),
)
_LETTER = re.compile(r"\s*(?:\\text\{)?\(?([A-Za-z])\)?[.}]*(?:\s.*)?", re.DOTALL)


def extract_choice(solution_str: str) -> str | None:
    r"""Return the chosen letter in upper case; ``None`` where the response chooses none.

    Understood are ``\boxed{C}``, ``<answer>C</answer>``, ``Answer: C``, ``the answer is (C)``, and a line with only
    a letter.
    """
    boxed = last_boxed(solution_str)
    if boxed is not None and (letter := _LETTER.fullmatch(boxed)):
        return letter.group(1).upper()
    for form in _FORMS:
        if letters := form.findall(solution_str):
            return letters[-1].upper()
    return None


def compute_score(solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    """Score one response.

    Args:
        solution_str: The response.
        ground_truth: The right letter, the right choice's position from 0 (an int), or its text.
        extra_info: May hold ``choices``, the texts in order; needed where ``ground_truth`` is a text.

    Returns:
        1.0 if the right letter is chosen, else 0.0.

    Raises:
        ValueError: If ``ground_truth`` names no choice.
    """
    return float(extract_choice(solution_str) == _golden_letter(ground_truth, (extra_info or {}).get("choices")))


def _golden_letter(ground_truth: Any, choices: Sequence[str] | None) -> str:
    texts = None if choices is None else [str(choice).strip() for choice in choices]
    if isinstance(ground_truth, int) and not isinstance(ground_truth, bool):
        if 0 <= ground_truth < (26 if texts is None else len(texts)):
            return chr(ord("A") + ground_truth)
    else:
        golden = str(ground_truth).strip()
        if texts is not None and golden in texts:
            return chr(ord("A") + texts.index(golden))
        if re.fullmatch(r"\(?[A-Za-z]\)?\.?", golden):
            return golden.strip("().").upper()
    raise ValueError(
        f"ground_truth={ground_truth!r} names no choice: give a letter, a position from 0, "
        f"or one of extra_info['choices'] (now {choices!r})."
    )
