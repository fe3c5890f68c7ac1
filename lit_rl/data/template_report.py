"""Examine a chat template before a run: how it ends turns, what it inserts, and whether later turns can be exact.

Position in the flow: `ChatTemplate.self_test` -> **report**, printed once at start. It renders short made-up
conversations and compares them; nothing depends on the result but the reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lit_rl.data.chat_template import ChatTemplateError

if TYPE_CHECKING:
    from lit_rl.data.chat_template import ChatTemplate

_USER: dict[str, Any] = {"role": "user", "content": "Question"}
_NEXT_USER: dict[str, Any] = {"role": "user", "content": "Another"}
_TOOL: dict[str, Any] = {"role": "tool", "name": "tool", "tool_call_id": "call00000", "content": "Result"}


@dataclass(frozen=True, kw_only=True)
class TemplateReport:
    """What a chat template does.

    Attributes:
        turn_end: Token that ends an assistant turn; empty if there is none.
        after_turn_end: Text written between that token and the next turn, such as a newline.
        generation_prompt: Text that asks for the next assistant turn.
        default_preamble: Text put before a conversation without system message: a default system prompt.
        strips_reasoning: Whether earlier assistant turns lose their ``<think>`` part.
        has_tool_turns: Whether tool results can be rendered.
        merges_tool_messages: Whether consecutive tool results share one turn.
        repeats_preamble: Whether system prompt or tools are written again before a later user turn.
        is_exact: Whether prompt, sampled turn and appended ids equal the whole conversation rendered at once.
        problems: What the user should look at.
    """

    turn_end: str
    after_turn_end: str
    generation_prompt: str
    default_preamble: str
    strips_reasoning: bool
    has_tool_turns: bool
    merges_tool_messages: bool
    repeats_preamble: bool
    is_exact: bool
    problems: list[str] = field(default_factory=list)

    def describe(self) -> str:
        """Return the report as a few lines for the start of a run."""
        habits = {
            "inserts a default system prompt": bool(self.default_preamble),
            "strips earlier reasoning": self.strips_reasoning,
            "merges tool messages": self.merges_tool_messages,
            "repeats system prompt or tools (not appended again)": self.repeats_preamble,
            "has no tool turns": not self.has_tool_turns,
        }
        found = ", ".join(habit for habit, has_it in habits.items() if has_it) or "nothing unusual"
        lines = [
            f"Chat template: turns end with {self.turn_end + self.after_turn_end!r}, "
            f"answers start after {self.generation_prompt!r}; {found}.",
            *(f"Chat template problem: {problem}" for problem in self.problems),
        ]
        return "\n".join(lines)


def examine_template(template: ChatTemplate) -> TemplateReport:
    """Return the report of a template.

    Raises:
        ChatTemplateError: If it cannot even render one user message.
    """
    prompt = template.render_text([_USER])
    without_prompt = template.render_text([_USER], add_generation_prompt=False)
    problems: list[str] = []
    try:
        tail = template.encode(template.tail_text([], template.stand_in(), [_NEXT_USER]))
    except ChatTemplateError as error:
        tail = []
        problems.append(f"no second turn is possible: {error}")
    closer, after = _split_at_specials(template, tail)
    if closer and template.tokenizer.eos_token != closer:
        problems.append(
            f"it ends turns with {closer!r}, but the tokenizer's end token is {template.tokenizer.eos_token!r}: "
            "make sure that the engine stops at both"
        )
    is_exact = bool(tail) and _appending_equals_rendering(template, closer)
    if tail and not is_exact and not template.repeats_preamble:
        problems.append("a conversation rendered at once differs from prompt, answer and appended turn")
    tool_turns = _specials_of_tool_turns(template)
    return TemplateReport(
        turn_end=closer,
        after_turn_end=after,
        generation_prompt=prompt.removeprefix(without_prompt) if prompt.startswith(without_prompt) else "",
        default_preamble=_default_preamble(template, prompt),
        strips_reasoning=_strips_reasoning(template),
        has_tool_turns=tool_turns is not None,
        merges_tool_messages=tool_turns is not None and tool_turns[0] == tool_turns[1],
        repeats_preamble=template.repeats_preamble,
        is_exact=is_exact,
        problems=problems,
    )


def _split_at_specials(template: ChatTemplate, tail: list[int]) -> tuple[str, str]:
    """Return the token that ends the turn and the text up to the next turn's first token."""
    places = [index for index, token in enumerate(tail) if token in template.special_ids]
    if not places or template.turn_closers[0] is None:
        return "", ""
    after = tail[places[0] + 1 : places[1]] if len(places) > 1 else []
    return template.tokenizer.decode([tail[places[0]]]), template.tokenizer.decode(after)


def _appending_equals_rendering(template: ChatTemplate, closer: str) -> bool:
    turn = template.stand_in()
    conversation = [_USER, turn, _NEXT_USER]
    try:
        prompt, whole = template.render_text([_USER]), template.render_text(conversation)
        # Some templates write more than the text (a channel, a space); the policy samples that too.
        before, _, _ = whole.removeprefix(prompt).partition(turn["content"])
        answer = before + turn["content"] + closer
        appended = template.continuation_ids(conversation, 2, template.encode(answer))
        # Compared as text: the same text may have other ids at the start of an answer, "\n\n" + "A" for one.
        return prompt + answer + str(template.tokenizer.decode(appended)) == whole
    except ChatTemplateError:
        return False


def _default_preamble(template: ChatTemplate, prompt: str) -> str:
    """Return what stands before a first user turn and not before a later one, if it is more than a start token."""
    try:
        tail = template.tail_text([], template.stand_in(), [_NEXT_USER])
    except ChatTemplateError:
        return ""
    preamble = template.encode(prompt.partition(_USER["content"])[0])
    before_later = template.encode(tail.partition(_NEXT_USER["content"])[0])
    while preamble and before_later and preamble[-1] == before_later[-1]:
        del preamble[-1], before_later[-1]
    has_text = template.tokenizer.decode(preamble, skip_special_tokens=True).strip()
    return str(template.tokenizer.decode(preamble)) if has_text else ""


def _strips_reasoning(template: ChatTemplate) -> bool:
    turn = {"role": "assistant", "content": "<think>\nReasoning\n</think>\n\nAnswer"}
    try:
        return "Reasoning" not in template.render_text([_USER, turn, _NEXT_USER])
    except ChatTemplateError:
        return False


def _specials_of_tool_turns(template: ChatTemplate) -> tuple[int, int] | None:
    """Return the number of special tokens that one and two tool results add, ``None`` without tool turns."""
    counts = []
    for results in ([_TOOL], [_TOOL, _TOOL]):
        conversation = [_USER, {"role": "assistant", "content": "Calling"}, *results]
        try:
            appended = template.continuation_ids(conversation, 2, [])
        except ChatTemplateError:
            return None
        if template.tokenizer.decode(appended).count("Result") != len(results):
            return None
        counts.append(sum(token in template.special_ids for token in appended))
    return counts[0], counts[1]
