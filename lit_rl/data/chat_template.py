"""Turn chat messages into token ids: whole prompts, and the exact ids that later turns append.

Position in the flow: prompt source -> **chat template** -> agent loop -> engine. The overlong filter measures prompts
with the same object, so filter and rollout cannot disagree.

Sampled ids are never rendered again. A later turn is rendered behind a stand-in for the policy's turn that holds a
marker, and what the template writes after the marker is what gets appended. Whatever the template does to earlier turns
(stripping reasoning, a default system prompt, a different last turn) stands before the marker and cannot leak in.
Nothing here truncates, samples or knows about log-probs. `lit_rl.data.template_report` says what a template does.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from lit_rl.types import Message

if TYPE_CHECKING:
    from lit_rl.data.template_report import TemplateReport

_APPENDABLE_ROLES = ("tool", "user", "system", "developer")
# What a template raises on an unexpected message: its own raise_exception, or Python errors out of filters and methods.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
# Mistral's templates insist on ids of nine characters.
_STAND_IN_CALL_ID = "call00000"
_MAX_CACHED_PROMPTS = 64


class ChatTemplateError(ValueError):
    """A template refused or failed to render a conversation."""


class ChatTemplate:
    """A tokenizer's chat template with tools and template variables filled in.

    Args:
        tokenizer: A Hugging Face tokenizer.
        tools: OpenAI function schemas shown to the model, the same for every conversation.
        template_kwargs: Further variables of the template, such as ``{"enable_thinking": False}``.
        custom_template: Jinja text, or the path of a ``.jinja`` file, instead of the tokenizer's own template.
        end_token_ids: Ids that end a sampled turn beside the tokenizer's end token and what the template itself writes.

    Raises:
        ValueError: If there is no template.
        FileNotFoundError: If the template file does not exist.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        custom_template: str | None = None,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        if custom_template is not None and custom_template.endswith(".jinja"):
            custom_template = Path(custom_template).read_text()
        if custom_template is None and not tokenizer.chat_template:
            raise ValueError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template. Give custom_template, or take an "
                "instruct model."
            )
        self.tokenizer = tokenizer
        self.tools = list(tools) if tools else None
        self.template_kwargs = dict(template_kwargs or {})
        self.custom_template = custom_template
        self._end_ids = {*end_token_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])}
        # The samples of a group ask for the same prompt, and encoding takes five times as long as rendering.
        self._prompt_ids: dict[str, list[int]] = {}
        # Random, so that no tool can answer with it.
        self._marker = f"marker{secrets.token_hex(8)}"

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Return the ids of a conversation with the generation prompt at the end.

        Args:
            messages: The conversation.
            tools: Schemas for this conversation only; default: the object's own.

        Raises:
            ChatTemplateError: If the template fails on these messages.
        """
        text = self.render_text(messages, tools)
        ids = self._prompt_ids.get(text)
        if ids is None:
            if len(self._prompt_ids) >= _MAX_CACHED_PROMPTS:
                self._prompt_ids.clear()
            ids = self._prompt_ids[text] = self.encode(text)
        return list(ids)

    def continuation_ids(
        self,
        messages: Sequence[Message],
        num_old: int,
        sampled_ids: Sequence[int],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids to append after a sampled turn: its end where it lacks one, new messages, generation prompt.

        The ids in front of them stay as the engine produced them, also where the template would render them otherwise.

        Args:
            messages: The whole conversation, the new messages last.
            num_old: Messages already in the ids; the last of them is the policy's turn.
            sampled_ids: Ids of that turn as sampled. Only the last one is looked at: is the turn closed?
            tools: As in `render_prompt`.

        Raises:
            ValueError: If there is no new message, one of another role than tool, user, system or developer, or no
                policy turn before them.
            ChatTemplateError: If the template fails on these messages.
        """
        new = list(messages[num_old:])
        roles = [str(message.get("role")) for message in new]
        if not new or set(roles) - set(_APPENDABLE_ROLES):
            raise ValueError(f"Messages to append have roles {roles}; give at least one, each of {_APPENDABLE_ROLES}.")
        if num_old < 1 or messages[num_old - 1].get("role") != "assistant":
            raise ValueError(f"messages[{num_old - 1}] must be the assistant turn that the sampled ids stand for.")
        leading = [] if self.repeats_preamble else _leading_messages(messages[:num_old])
        tail, has_calls = self._tail_after_turn(leading, messages[num_old - 1], new, tools)
        usual_closer = self.turn_closers[1 if has_calls else 0]
        last_id = sampled_ids[-1] if sampled_ids else None
        if usual_closer is None:  # GLM's turns are ended by the next role's token, which the policy samples
            return tail[1:] if tail and tail[0] == last_id else tail
        closer_index = self._closer_index(tail, usual_closer)
        if closer_index is None:
            raise ChatTemplateError(f"The template writes no end of turn before messages of roles {roles}.")
        is_closed = last_id in self._end_ids or last_id in self.turn_closers or last_id == tail[closer_index]
        return tail[closer_index + 1 :] if is_closed else tail[closer_index:]

    def self_test(self) -> TemplateReport:
        """Return what this template does with turns, tools, reasoning and system prompts, and what is wrong with it."""
        from lit_rl.data.template_report import examine_template

        return examine_template(self)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation; arguments and errors as in `render_prompt`."""
        tools = self.tools if tools is None else list(tools) or None
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.custom_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )
        except _RENDER_ERRORS as error:
            roles = [message.get("role") for message in messages]
            raise ChatTemplateError(f"The chat template failed on roles {roles}: {error}") from error
        return text

    def encode(self, text: str) -> list[int]:
        """Return the ids of rendered text; the template has already written every special token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def tail_text(
        self,
        leading: Sequence[Message],
        assistant: Message,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return what the template writes after an assistant turn that ends in the marker.

        Raises:
            ChatTemplateError: If the template fails or leaves the assistant's text out.
        """
        conversation = [*leading, {"role": "user", "content": "Hi"}, assistant, *new]
        text = self.render_text(conversation, tools, add_generation_prompt=add_generation_prompt)
        position = text.rfind(self._marker)
        if position < 0:
            raise ChatTemplateError("The chat template leaves the assistant's text out.")
        return text[position + len(self._marker) :]

    def stand_in(self, calls: Sequence[dict[str, Any]] = ()) -> Message:
        """Return an assistant turn whose rendering ends in the marker, with tool calls but not their arguments.

        Args:
            calls: OpenAI tool calls; only ids and names are kept, the arguments are the policy's own text.
        """
        message: Message = {"role": "assistant", "content": self._marker}
        if not calls:
            return message
        # Some templates leave the text of a calling turn out, so the last call holds the marker too.
        message["tool_calls"] = [
            {
                "type": "function",
                "id": call.get("id") or _STAND_IN_CALL_ID,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": {"x": self._marker} if index == len(calls) - 1 else {},
                },
            }
            for index, call in enumerate(calls)
        ]
        return message

    @cached_property
    def repeats_preamble(self) -> bool:
        """Whether system prompt or tools are written before a later user turn (Mistral): then they are left out."""
        probe = "PreambleProbe"
        new = [{"role": "user", "content": "Next"}]
        function = {"name": probe, "description": "", "parameters": {"type": "object", "properties": {}}}
        for leading in ([{"role": "system", "content": probe}], []):  # some templates refuse system messages
            try:
                return probe in self.tail_text(
                    leading, self.stand_in(), new, [{"type": "function", "function": function}]
                )
            except ChatTemplateError:
                continue
        return False

    @cached_property
    def turn_closers(self) -> tuple[int | None, int | None]:
        """Special tokens at the end of a last assistant turn, with text and with a tool call; ``None`` for no token."""
        closers: list[int | None] = []
        for stand_in in (self.stand_in(), self.stand_in([_call("tool")])):
            try:
                tail = self.encode(self.tail_text([], stand_in, [], add_generation_prompt=False))
            except ChatTemplateError:  # no tool calls in this template, or no assistant turn at the end
                closers.append(None)
                continue
            closers.append(next((token for token in reversed(tail) if token in self.special_ids), None))
        return closers[0], closers[1]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, in the vocabulary or added."""
        added = {token_id for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self.tokenizer.all_special_ids))

    def _tail_after_turn(
        self,
        leading: Sequence[Message],
        assistant: Message,
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
    ) -> tuple[list[int], bool]:
        """Return the ids after the marker, and whether the stand-in had tool calls."""
        if self.repeats_preamble:
            tools = []
        calls = assistant.get("tool_calls") or [
            _call(str(message.get("name") or "tool"), message.get("tool_call_id"))
            for message in new
            if message["role"] == "tool"
        ]
        # Some templates refuse several calls in one turn (Llama 3), some refuse calls altogether.
        attempts = [calls, calls[:1], []] if calls else [[]]
        for index, attempt in enumerate(attempts):
            try:
                tail = self.tail_text(leading, self.stand_in(attempt), new, tools)
            except ChatTemplateError:
                if index == len(attempts) - 1:
                    raise
                continue
            return self.encode(tail), bool(attempt)
        raise AssertionError("the last attempt returns or raises")

    def _closer_index(self, tail: Sequence[int], usual_closer: int) -> int | None:
        """Return where the turn ends in the ids after the marker."""
        if usual_closer in tail:
            return tail.index(usual_closer)
        # A turn that is no longer the last may end otherwise: gpt-oss writes <|end|> instead of <|return|>.
        return next((index for index, token in enumerate(tail) if token in self.special_ids), None)


def _call(name: str, call_id: str | None = None) -> dict[str, Any]:
    return {"type": "function", "id": call_id or _STAND_IN_CALL_ID, "function": {"name": name, "arguments": {}}}


def _leading_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the system messages at the start: some generation prompts depend on them."""
    leading = []
    for message in messages:
        if message.get("role") not in ("system", "developer"):
            break
        leading.append(message)
    return leading
