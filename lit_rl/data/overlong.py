"""Leave out prompts that are too long, measured with the rollout's own chat template.

Position in the flow: prompt source -> **overlong filter** -> prompt cursor. Too long and failed to render are counted
apart: the first is expected in real data, the second is a fault in data or template. Nothing is truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.data.chat_template import ChatTemplate, ChatTemplateError
from lit_rl.data.prompt_rows import PromptSource
from lit_rl.types import Prompt


@dataclass(frozen=True, kw_only=True)
class OverlongCounts:
    """What became of the rows.

    Attributes:
        num_kept: Rows within the limit.
        num_overlong: Rows over it.
        num_failed: Rows the chat template refused.
        longest_tokens: Longest prompt rendered, kept or not.
        first_error: Message of the first refusal, naming the row; empty if there was none.
    """

    num_kept: int
    num_overlong: int
    num_failed: int
    longest_tokens: int
    first_error: str = ""

    def describe(self) -> str:
        """Return one line for the start of a run."""
        failed = f", {self.num_failed} failed to render ({self.first_error})" if self.num_failed else ""
        overlong = f"{self.num_overlong} too long (longest {self.longest_tokens} tokens)"
        return f"Prompts: {self.num_kept} kept, {overlong}{failed}."


class WithoutOverlong:
    """The prompts of a source that fit, in their order.

    Args:
        source: All prompts.
        chat_template: The one that the rollout renders with, its tools and template variables included.
        max_prompt_tokens: Longest prompt kept, generation prompt and tool schemas included.
        tools: Tool schemas instead of the template's own; a function gives each row its own.
        max_failed_fraction: Largest share of rows, in [0, 1], that may fail to render.

    Attributes:
        counts: What became of the rows.

    Raises:
        ValueError: If no row is left, or more rows failed than allowed.
    """

    def __init__(
        self,
        source: PromptSource,
        chat_template: ChatTemplate,
        max_prompt_tokens: int,
        *,
        tools: Sequence[dict[str, Any]] | Callable[[Prompt], Sequence[dict[str, Any]]] | None = None,
        max_failed_fraction: float = 0.05,
    ) -> None:
        self._source = source
        self._kept: list[int] = []
        num_failed = longest_tokens = 0
        first_error = ""
        for index in range(len(source)):
            prompt = source[index]
            schemas = tools(prompt) if callable(tools) else tools
            try:
                num_tokens = len(chat_template.render_prompt(prompt.messages, schemas))
            except ChatTemplateError as error:
                num_failed += 1
                first_error = first_error or f"row {prompt.row_id}: {error}"
                continue
            longest_tokens = max(longest_tokens, num_tokens)
            if num_tokens <= max_prompt_tokens:
                self._kept.append(index)
        self.counts = OverlongCounts(
            num_kept=len(self._kept),
            num_overlong=len(source) - len(self._kept) - num_failed,
            num_failed=num_failed,
            longest_tokens=longest_tokens,
            first_error=first_error,
        )
        self._check(max_prompt_tokens, max_failed_fraction)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Prompt:
        return self._source[self._kept[index]]

    def _check(self, max_prompt_tokens: int, max_failed_fraction: float) -> None:
        counts = self.counts
        if counts.num_failed > max_failed_fraction * len(self._source):
            raise ValueError(
                f"{counts.num_failed} of {len(self._source)} prompts failed to render, more than the share of "
                f"{max_failed_fraction} that is allowed. First: {counts.first_error}"
            )
        if not self._kept:
            raise ValueError(
                f"max_prompt_tokens={max_prompt_tokens} leaves none of {len(self._source)} prompts: the longest has "
                f"{counts.longest_tokens} tokens, tool schemas included. Raise max_prompt_tokens, or shorten "
                "prompts or tools."
            )
