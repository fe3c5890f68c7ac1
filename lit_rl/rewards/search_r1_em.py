"""Exact match for question answering with search (Search-R1).

The last ``<answer>...</answer>`` of the policy's own text is compared with the gold answers under SQuAD's rule. The
rule has known oddities that are kept for comparability: ``1.5`` and ``15`` are equal, and so are ``New-York`` and
``NewYork``, because punctuation is deleted; `normalize_answer_unicode` is the variant without them. Source:
arXiv:2503.09516.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

_OPENING, _CLOSING = "<answer>", "</answer>"
_MAX_TAGS = 10
_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = frozenset({"a", "an", "the"})
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def extract_solution(solution_str: str) -> str | None:
    """Return the text of the last complete ``<answer>`` block, trimmed; ``None`` without one."""
    answer = None
    start = solution_str.find(_OPENING)
    while start >= 0:
        end = solution_str.find(_CLOSING, start)
        if end < 0:
            break
        answer = solution_str[start + len(_OPENING) : end]
        start = solution_str.find(_OPENING, end)
    return answer if answer is None else answer.strip()


def normalize_answer(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation and articles, with single spaces."""
    words = text.lower().translate(_DELETE_PUNCTUATION).split()
    if text.isascii():
        return " ".join([word for word in words if word not in _ARTICLES])
    # A word boundary lies between a letter and, say, a curly quote: the regular expression decides there.
    return " ".join(_ARTICLE.sub(" ", " ".join(words)).split())


def normalize_answer_unicode(text: str) -> str:
    """Return a normal form that keeps words apart: compatibility forms unified, every punctuation mark a space."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    spaced = "".join(" " if unicodedata.category(character)[0] in "PS" else character for character in folded)
    return " ".join([word for word in spaced.split() if word not in _ARTICLES])


def em_check(prediction: str, golden_answers: str | Iterable[str]) -> int:
    """Return 1 if any gold answer equals the prediction after normalisation.

    Gold answers that normalise to nothing (``The``) are ignored: they would match every empty prediction.
    """
    normalized = normalize_answer(prediction)
    if not normalized:
        return 0
    for golden in _as_list(golden_answers):
        if _normalize_golden(golden) == normalized:
            return 1
    return 0


def subem_check(prediction: str, golden_answers: str | Iterable[str]) -> int:
    """Return 1 if any gold answer is contained in the prediction after normalisation."""
    normalized = normalize_answer(prediction)
    goldens = (_normalize_golden(golden) for golden in _as_list(golden_answers))
    return int(any(golden in normalized for golden in goldens if golden))


def compute_score(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Any = None,
    *,
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score one response by exact match.

    Args:
        solution_str: The policy's own text, without tool results.
        ground_truth: ``{"target": gold answer or list of them}``.
        extra_info: Not used.
        format_score: For an answer that is wrong.
        score: For an answer that is right; a quarter of it where the text has more than ten opening or closing tags.

    Returns:
        0.0 without an answer, else as above.
    """
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    # Short texts have no room for so many tags.
    has_tag_spam = len(solution_str) > _MAX_TAGS * len(_OPENING) and (
        solution_str.count(_OPENING) > _MAX_TAGS or solution_str.count(_CLOSING) > _MAX_TAGS
    )
    return score / 4 if has_tag_spam else score


def compute_score_subem(
    solution_str: str,
    ground_truth: Mapping[str, Any],
    extra_info: Any = None,
    *,
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score one response by containment of a gold answer; see `compute_score`, without the tag penalty."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    return score if subem_check(answer, ground_truth["target"]) else format_score


@lru_cache(maxsize=16384)
def _normalize_golden(golden: str) -> str:
    return normalize_answer(golden)


def _as_list(golden_answers: str | Iterable[str]) -> list[str]:
    return [golden_answers] if isinstance(golden_answers, str) else list(map(str, golden_answers))
