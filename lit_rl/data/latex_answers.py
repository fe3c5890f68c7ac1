"""Find the final answer in a mathematical text, and compare answers written in LaTeX.

Used by the scorers of MATH, DAPO-math and Geometry3K. Equal normal forms are equal; otherwise ``math-verify``
decides, where it is installed (``pip install 'lit_rl[rewards]'``).
"""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_BOXES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\boxed\s+(?=[^\s{])")
_LONGEST_ANSWER = 1000
_VERIFY_TIMEOUT_S = 5

_REMOVED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\\(?:quad|qquad)\b|\^\{?\\circ\}?|\\%|%|\\\$|\$|~")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textit)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|(\w))(?:\{([^{}]*)\}|(\w))")
_SHORT_ROOT = re.compile(r"\\sqrt(\w)")
_SLASH = re.compile(r"^(-?\d+)/(-?\d+)$")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_ASSIGNMENT = re.compile(r"^[a-zA-Z]\s*=\s*")


def last_boxed(text: str) -> str | None:
    r"""Return what the last ``\boxed{...}``, ``\boxed x`` or ``\fbox{...}`` holds; ``None`` without a complete one."""
    boxes = list(_BOXES.finditer(text))
    if not boxes:
        return None
    box = boxes[-1]
    if not box.group().endswith("{"):
        return re.split(r"[\s$]", text[box.end() :], maxsplit=1)[0]
    depth = 1
    for position in range(box.end(), len(text)):
        if text[position] == "{" and text[position - 1] != "\\":
            depth += 1
        elif text[position] == "}" and text[position - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[box.end() : position]
    return None


def normalize_latex(answer: str) -> str:
    r"""Return a normal form: no spaces, sizes, units in ``\text``, thousands commas; fractions as ``\frac{a}{b}``."""
    answer = answer.strip().replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\\\", "\\")
    answer = _TEXT.sub(lambda match: match.group(1) if answer.strip().startswith(match.group()) else "", answer)
    answer = _REMOVED.sub("", answer)
    answer = _ASSIGNMENT.sub("", answer.strip())
    answer = _THOUSANDS.sub("", answer)
    answer = "".join(answer.split()).rstrip(".")
    answer = _SHORT_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", answer)
    answer = _SHORT_ROOT.sub(r"\\sqrt{\1}", answer)
    answer = _SLASH.sub(r"\\frac{\1}{\2}", answer)
    return "0" + answer if answer.startswith(".") else answer


def are_equal(answer: str, golden: str) -> bool:
    """Whether two answers mean the same; an answer that cannot be read is not equal."""
    if normalize_latex(answer) == normalize_latex(golden):
        return True
    if len(answer) > _LONGEST_ANSWER:
        return False
    verify = _math_verify()
    return verify is not None and verify(answer, golden)


@functools.cache
def _math_verify() -> Callable[[str, str], bool] | None:
    try:
        import math_verify
    except ImportError:
        logger.warning("math-verify is not installed: only answers of equal form count as equal. See lit_rl[rewards].")
        return None

    def verify(answer: str, golden: str) -> bool:
        # The library limits its time with a signal, which only the main thread may set; the reward worker has its
        # own limit.
        limit: Any = _VERIFY_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
        try:
            parsed = [math_verify.parse(rf"\boxed{{{text}}}", parsing_timeout=limit) for text in (golden, answer)]
            return bool(math_verify.verify(*parsed, timeout_seconds=limit))
        except Exception:  # sympy raises anything for odd input; such an answer is no answer
            logger.debug("math-verify failed on %r", answer, exc_info=True)
            return False

    return verify
