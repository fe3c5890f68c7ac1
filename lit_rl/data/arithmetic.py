"""Generate arithmetic questions with checkable answers: the task that needs no files.

Position in the flow: **prompt source** -> prompt cursor -> agent loops; `parse_answer` and `is_well_formed` are the
rule that the reward of data source ``arithmetic`` applies. Nothing here is read from disk, and the same settings give
the same rows on every machine.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

from lit_rl.types import Prompt

Split = Literal["train", "val", "test"]

DATA_SOURCE = "arithmetic"

# Of 100 buckets. At operands 1..50 this leaves 377 sums for val, 421 for test and 1,702 for train.
_VAL_BUCKETS = range(0, 15)
_TEST_BUCKETS = range(15, 30)
# Above this many candidates rows are drawn, not listed.
_MAX_LISTED = 200_000
# Draws per row asked for, before the settings are called too small.
_MAX_DRAWS_PER_ROW = 400
_MAX_ANSWER_DIGITS = 40
_OPERATIONS = ("+", "-", "*")

# A sign counts only where no number or closing bracket stands before it: "10-3" ends in 3, "= -3" ends in -3.
_NUMBER = re.compile(r"(?:(?<![\d)])[-\u2212])?(?<![\d.])\d+(?:,\d{3})*(?:\.\d+)?")
_ONLY_A_NUMBER = re.compile(r"\s*[-\u2212]?\d+(?:,\d{3})*\.?\s*")
_NUMBER_OR_EQUATION = re.compile(r"(?:[-\u2212\d,\s+*()]+=)?" + _ONLY_A_NUMBER.pattern)


class Arithmetic:
    """Questions such as "What is 3 + 4? Answer with the number only.", answered by a whole number.

    Train, val and test never share a set of operands: 3 + 4 and 4 + 3 fall on the same side, whatever the seed, the
    operand range and the operations, so a model that has learned one by heart has not seen the other.

    Args:
        split: ``train`` (70 % of the operand sets), ``val`` (15 %) or ``test`` (15 %).
        num_rows: Rows, all different. Default: every one there is.
        seed: Chooses and orders the rows; it does not move a row to another split.
        min_operand: Smallest operand, 0 or more.
        max_operand: Largest operand.
        operations: Any of ``+``, ``-``, ``*``. ``*`` binds tighter.
        num_terms: Operands in one question, 2 or more.
        question: Text of the user message; ``{expression}`` stands for the sum.
        system_prompt: Text of a system message before it, if any.

    Raises:
        ValueError: If a setting is out of range, or there are fewer rows than asked for.
    """

    def __init__(
        self,
        *,
        split: Split = "train",
        num_rows: int | None = None,
        seed: int = 0,
        min_operand: int = 1,
        max_operand: int = 50,
        operations: Sequence[str] = ("+",),
        num_terms: int = 2,
        question: str = "What is {expression}? Answer with the number only.",
        system_prompt: str | None = None,
    ) -> None:
        if split not in ("train", "val", "test"):
            raise ValueError(f"Arithmetic: split={split!r} must be train, val or test.")
        if not 0 <= min_operand <= max_operand:
            raise ValueError(
                f"Arithmetic: min_operand={min_operand} and max_operand={max_operand} must satisfy 0 <= min <= max."
            )
        if not operations or set(operations) - set(_OPERATIONS):
            raise ValueError(f"Arithmetic: operations={list(operations)} must be some of {list(_OPERATIONS)}.")
        if num_terms < 2:
            raise ValueError(f"Arithmetic: num_terms={num_terms} must be at least 2.")
        if num_rows is not None and num_rows < 1:
            raise ValueError(f"Arithmetic: num_rows={num_rows} must be at least 1; leave it out for all rows.")
        if "{expression}" not in question:
            raise ValueError(f"Arithmetic: question={question!r} must contain {{expression}}.")
        self.split = split
        self.question = question
        self.system_prompt = system_prompt
        self._operands = range(min_operand, max_operand + 1)
        self._operations = tuple(dict.fromkeys(operations))
        self._num_terms = num_terms
        self._rows = self._choose_rows(num_rows, random.Random(seed))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        operands, signs = self._rows[index]
        expression = _write(operands, signs)
        messages = [{"role": "user", "content": self.question.replace("{expression}", expression)}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return Prompt(
            row_id=f"{DATA_SOURCE}/{expression.replace(' ', '')}",
            messages=messages,
            data_source=DATA_SOURCE,
            ground_truth=str(_evaluate(operands, signs)),
            ability="math",
            extra_info={"index": index, "split": self.split, "expression": expression},
        )

    def pairs(self) -> set[tuple[int, ...]]:
        """Return the operand sets of all rows, each sorted: what the splits keep apart."""
        return {tuple(sorted(operands)) for operands, _ in self._rows}

    def _choose_rows(self, num_rows: int | None, rng: random.Random) -> list[_Row]:
        num_candidates = len(self._operands) ** self._num_terms * len(self._operations) ** (self._num_terms - 1)
        if num_candidates <= _MAX_LISTED:
            rows = [row for row in self._all_candidates() if _split_of(row[0]) == self.split]
            rng.shuffle(rows)
        elif num_rows is None:
            raise ValueError(
                f"Arithmetic: these settings allow {num_candidates:,} questions, too many to list. Give num_rows."
            )
        else:
            rows = self._draw(num_rows, rng)
        if not rows or (num_rows is not None and len(rows) < num_rows):
            raise ValueError(
                f"Arithmetic: num_rows={num_rows}, but these settings give only {len(rows)} rows of split "
                f"{self.split}. Lower num_rows, or raise max_operand or num_terms."
            )
        return rows[:num_rows]

    def _all_candidates(self) -> Iterator[_Row]:
        for operands in itertools.product(self._operands, repeat=self._num_terms):
            for signs in itertools.product(self._operations, repeat=self._num_terms - 1):
                yield operands, signs

    def _draw(self, num_rows: int, rng: random.Random) -> list[_Row]:
        rows: dict[_Row, None] = {}  # a dict keeps the order, a set would not
        for _ in range(num_rows * _MAX_DRAWS_PER_ROW):
            operands = tuple(rng.choice(self._operands) for _ in range(self._num_terms))
            signs = tuple(rng.choice(self._operations) for _ in range(self._num_terms - 1))
            if _split_of(operands) == self.split:
                rows[operands, signs] = None
                if len(rows) == num_rows:
                    break
        return list(rows)


_Row = tuple[tuple[int, ...], tuple[str, ...]]
"""Operands and the operations between them."""


def parse_answer(text: str) -> int | None:
    """Return the last number of an answer if it is whole, else ``None``.

    Thousands separators, a minus sign of either kind, a final full stop and zero decimals are accepted: ``"1,024"``,
    ``"= -3."`` and ``"7.0"`` give 1024, -3 and 7; ``"7.5"`` gives ``None``.

    Args:
        text: The decoded response.
    """
    last = deque(_NUMBER.finditer(text), maxlen=1)
    if not last:
        return None
    whole, _, decimals = last[0].group().replace(",", "").replace("\u2212", "-").partition(".")
    # int() refuses thousands of digits, and a response of digits only is no answer.
    if decimals.strip("0") or len(whole) > _MAX_ANSWER_DIGITS:
        return None
    return int(whole)


def is_well_formed(text: str) -> bool:
    """Return whether an answer is one whole number and nothing else but white space around it and a final full stop."""
    return _ONLY_A_NUMBER.fullmatch(text) is not None


def is_complete(text: str) -> bool:
    """Return whether an answer is one whole number, or a sum written out that ends in one, such as ``8 + 5 = 13``."""
    return _NUMBER_OR_EQUATION.fullmatch(text) is not None


def _split_of(operands: tuple[int, ...]) -> Split:
    """Return the split of a set of operands: a hash, so that it depends on nothing else."""
    digest = hashlib.blake2b(repr(sorted(operands)).encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % 100
    if bucket in _VAL_BUCKETS:
        return "val"
    return "test" if bucket in _TEST_BUCKETS else "train"


def _write(operands: tuple[int, ...], signs: tuple[str, ...]) -> str:
    return str(operands[0]) + "".join(f" {sign} {operand}" for sign, operand in zip(signs, operands[1:], strict=True))


def _evaluate(operands: tuple[int, ...], signs: tuple[str, ...]) -> int:
    products = [[operands[0]]]
    additive = ["+"]
    for sign, operand in zip(signs, operands[1:], strict=True):
        if sign == "*":
            products[-1].append(operand)
        else:
            additive.append(sign)
            products.append([operand])
    return sum(
        (-1 if sign == "-" else 1) * math.prod(factors) for sign, factors in zip(additive, products, strict=True)
    )
