"""A tool that checks a GSM8K answer and keeps it as the trajectory's result."""

from __future__ import annotations

import re

from lit_rl.tools.answer_tool import AnswerTool

_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")


class Gsm8kTool(AnswerTool):
    """``calc_gsm8k_reward(answer: string)``: the last number of the answer, compared as text."""

    function_name = "calc_gsm8k_reward"
    description = "Check an answer to the math problem."
    answer_description = "The answer, a number."

    def parse(self, text: str) -> str | None:
        """Return the last number, without ``,``, ``$`` and a final full stop."""
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "").replace("$", "").rstrip(".") if numbers else None
