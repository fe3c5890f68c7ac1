"""Turn demonstrations into the token ids that a rollout of the same conversation would hold, and mark what is learned.

Position in the flow: conversation source -> **conversation tokens** -> supervised fine-tuning. A sequence is built as
the agent loops build theirs: the rendered prompt, then turn by turn the ids that the policy would sample, its end token
included, and the ids that `ChatTemplate.continuation_ids` appends. So a policy that has learned from demonstrations
meets in its rollouts the very ids it was trained on. Learned are the policy's tokens alone; prompts, tool results, user
turns and what a template writes between turns are not. Nothing is truncated: too long conversations are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.data.chat_template import ChatTemplate, ChatTemplateError
from lit_rl.data.conversation_rows import Conversation, ConversationSource, is_learned
from lit_rl.types import Message

log = logging.getLogger(__name__)

_MAX_FAILED_SHARE = 0.05


@dataclass(kw_only=True)
class ConversationTokens:
    """A conversation as one sequence.

    Attributes:
        row_id: Of the row it comes from.
        prompt_ids: Everything before the first assistant turn, the generation prompt included.
        response_ids: Everything after, up to the end of the last assistant turn.
        loss_mask: 1 where the policy would sample the id and learns it, as long as ``response_ids``.
    """

    row_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]

    @property
    def length(self) -> int:
        """Tokens in all."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are learned."""
        return sum(self.loss_mask)


def tokenize_conversation(
    template: ChatTemplate, conversation: Conversation, tools: Sequence[dict[str, Any]] | None = None
) -> ConversationTokens:
    """Return the ids of a conversation with the mask of what is learned.

    Args:
        template: The one the policy is rolled out with.
        conversation: Begins with another role than the assistant's.
        tools: Schemas of conversations that bring none of their own.

    Raises:
        ChatTemplateError: If the template cannot render the messages, or leaves out an assistant's text or calls.
    """
    schemas = list(conversation.tools or tools or []) or None
    messages = [{key: value for key, value in m.items() if key != "weight"} for m in conversation.messages]
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    response_ids: list[int] = []
    loss_mask: list[int] = []
    for index, following in zip(turns, [*turns[1:], None], strict=True):
        turn = _turn_ids(template, messages[: index + 1], schemas)
        appended: list[int] = []
        if following is not None:
            appended = template.continuation_ids(messages[:following], index + 1, turn, schemas)
        if not _has_end_token(template, turn):
            # GLM's turns are ended by the next role's token, which the policy samples.
            turn, appended = (turn + appended[:1], appended[1:]) if appended else (_ended(template, turn), [])
        response_ids += turn + appended
        loss_mask += [int(is_learned(conversation.messages[index]))] * len(turn) + [0] * len(appended)
    return ConversationTokens(
        row_id=conversation.row_id,
        prompt_ids=template.render_prompt(messages[: turns[0]], schemas),
        response_ids=response_ids,
        loss_mask=loss_mask,
    )


def tokenize_source(
    source: ConversationSource,
    template: ChatTemplate,
    max_tokens: int,
    *,
    option: str,
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[ConversationTokens]:
    """Return the conversations of a source that fit and can be rendered; what is left out is counted and logged.

    Args:
        source: All conversations.
        template: The one the policy is rolled out with.
        max_tokens: Longest sequence kept.
        option: Where the source is configured, for messages: ``data.train_data``.
        tools: Schemas of conversations that bring none of their own.

    Raises:
        ValueError: If none is left, or more than one row in twenty fails to render.
    """
    if len(source) == 0:
        raise ValueError(f"{option}: the conversation source has no rows.")
    _warn_of_hidden_tools(source, template, option, tools)
    kept: list[ConversationTokens] = []
    num_failed = longest = 0
    first_error = ""
    for index in range(len(source)):
        try:
            tokens = tokenize_conversation(template, source[index], tools)
        except ChatTemplateError as error:
            num_failed += 1
            first_error = first_error or f"row {index}: {error}"
            continue
        longest = max(longest, tokens.length)
        if tokens.length <= max_tokens:
            kept.append(tokens)
    if num_failed > _MAX_FAILED_SHARE * len(source):
        raise ValueError(
            f"{option}: {num_failed} of {len(source)} conversations failed to render, more than the share of "
            f"{_MAX_FAILED_SHARE} that is allowed. First: {first_error}"
        )
    if not kept:
        raise ValueError(
            f"data.max_conversation_tokens={max_tokens} leaves none of {len(source)} conversations of {option}: the "
            f"longest has {longest} tokens. Raise it."
        )
    if len(kept) < len(source):
        failed = f", {num_failed} failed to render ({first_error})" if num_failed else ""
        too_long = len(source) - len(kept) - num_failed
        log.warning(
            "%s: %d conversations kept, %d too long (longest %d tokens)%s.",
            option,
            len(kept),
            too_long,
            longest,
            failed,
        )
    return kept


def _turn_ids(template: ChatTemplate, messages: list[Message], schemas: list[dict[str, Any]] | None) -> list[int]:
    """Return the ids the policy would sample for the last message, up to the end of its turn."""
    text = template.render_text(messages, schemas, add_generation_prompt=False)
    prompt = template.render_text(messages[:-1], schemas)
    if not text.startswith(prompt):
        raise ChatTemplateError(
            f"message {len(messages) - 1}: the conversation with the assistant's turn does not continue the prompt "
            f"that asks for it, which ends in {prompt[-40:]!r}; the template renders both differently."
        )
    turn = text[len(prompt) :]
    _check_is_written(messages[-1], turn, len(messages) - 1)
    ids = template.encode(turn)
    if template.turn_closers[1 if messages[-1].get("tool_calls") else 0] is None:
        return ids
    end = max((index for index, token in enumerate(ids) if token in template.special_ids), default=len(ids) - 1)
    return ids[: end + 1]


def _check_is_written(message: Message, turn: str, index: int) -> None:
    """A template that does not know calls leaves them out silently: an empty turn would be learned."""
    content = str(message.get("content") or "").strip()
    words = content.split()
    if words and words[-1] not in turn:
        raise ChatTemplateError(f"message {index}: the template leaves the assistant's text out.")
    for call in message.get("tool_calls") or ():
        name = str((call.get("function") or {}).get("name"))
        if name not in turn:
            raise ChatTemplateError(
                f"message {index}: the template leaves the call of {name!r} out. Take a template that writes "
                "tool_calls (data.chat_template), or write the call into the message's content."
            )


def _has_end_token(template: ChatTemplate, turn: list[int]) -> bool:
    return bool(turn) and turn[-1] in template.special_ids


def _ended(template: ChatTemplate, turn: list[int]) -> list[int]:
    end = template.tokenizer.eos_token_id
    return turn if end is None else [*turn, end]


def _warn_of_hidden_tools(
    source: ConversationSource, template: ChatTemplate, option: str, tools: Sequence[dict[str, Any]] | None
) -> None:
    schemas = next((c.tools for c in map(source.__getitem__, range(len(source))) if c.tools), None) or tools
    messages = [{"role": "user", "content": "Hi"}]
    if schemas and template.render_text(messages, schemas) == template.render_text(messages, []):
        log.warning(
            "%s: the chat template shows no tools, so the model does not see the schemas of the rows. Set a template "
            "that writes `tools`, or describe them in a system message.",
            option,
        )
