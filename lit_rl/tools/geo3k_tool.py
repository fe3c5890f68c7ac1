"""A tool that checks a Geometry3K answer and keeps it as the trajectory's result."""

from __future__ import annotations

from lit_rl.data.latex_answers import are_equal, last_boxed
from lit_rl.tools.answer_tool import AnswerTool


class Geo3kTool(AnswerTool):
    r"""``calc_geo3k_reward(answer: string)``: the content of ``\boxed{}``, or the whole answer, compared by meaning."""

    function_name = "calc_geo3k_reward"
    description = "Check an answer to the geometry problem."
    answer_description = r"The answer, as a number or in LaTeX, such as \frac{1}{2}."

    def parse(self, text: str) -> str | None:
        r"""Return what the last ``\boxed{}`` holds, else the text; ``None`` for an empty one."""
        return last_boxed(text) or text.strip() or None

    def is_right(self, answer: str, golden: str) -> bool:
        """Whether both are mathematically equal."""
        return are_equal(answer, golden)
