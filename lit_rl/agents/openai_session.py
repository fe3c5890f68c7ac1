"""The token side of a conversation that somebody else holds over OpenAI's chat-completions protocol.

Position in the flow: an agent written against the ``openai`` client -> HTTP endpoint -> **OpenAISession** -> client.
Every request carries its whole history as text. Where that history is one the session has seen, the ids of that turn
are kept and only the new messages are rendered. Where it was edited or branches off, a sequence of its own begins, so
that no token is trained in a place where it was not sampled. Nothing here knows HTTP.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lit_rl.agents.response import (
    Response,
    append_masked,
    append_turn,
    cut_at_end,
    empty_response,
    finish_response,
)
from lit_rl.agents.tool_messages import assistant_message
from lit_rl.agents.tool_parsers import ParsedMessage, ToolParser
from lit_rl.types import Message, SamplingParams

if TYPE_CHECKING:
    from lit_rl.agents.agent_loop import AgentLoop

_APPENDABLE = ("tool", "user", "system", "developer")
_SEED_STEP = 0x9E3779B97F4A7C15


class RequestRefused(ValueError):
    """The request cannot be answered; the message goes to the agent as OpenAI's error would.

    Args:
        message: What is wrong.
        code: OpenAI's error code.
    """

    def __init__(self, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.code = code


@dataclass(kw_only=True)
class OpenAISequence:
    """One training sequence of a session.

    Attributes:
        prompt_ids: What it begins with; never trained on.
        messages: The conversation as the chat template takes it.
        num_prompt_messages: Those of them that the prompt holds.
        keys: Comparable form of each message.
        tools: Schemas it was rendered with.
        response: Everything after the prompt.
        answers: After each turn of the policy: messages and response tokens so far.
        is_busy: Whether a request is extending it.
    """

    prompt_ids: list[int]
    messages: list[Message]
    num_prompt_messages: int
    keys: list[str]
    tools: list[dict[str, Any]]
    response: Response = field(default_factory=empty_response)
    answers: list[tuple[int, int]] = field(default_factory=list)
    is_busy: bool = False


class OpenAISession:
    """Answers the requests of one agent.

    Args:
        loop: Samples, renders and knows the limits.
        parser: Format of the policy's tool calls.
        sampling: Temperature, top-p and the like are the run's, whatever a request asks for: the trainer must know the
            distribution that was sampled from.

    Attributes:
        sequences: In order of their last answer, oldest first.
        is_exhausted: Whether a request was refused because its conversation had no tokens left.
    """

    def __init__(self, loop: AgentLoop, parser: ToolParser, sampling: SamplingParams) -> None:
        self.sequences: list[OpenAISequence] = []
        self._loop = loop
        self._parser = parser
        self._sampling = sampling
        self.is_exhausted = False
        self._num_answers = 0
        self._num_requests = 0

    async def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request of ``/chat/completions``.

        Args:
            request: The decoded body. Read are ``messages``, ``tools``, ``max_tokens``, ``max_completion_tokens`` and
                ``stop``.

        Raises:
            RequestRefused: If it cannot be answered.
        """
        messages = _read_messages(request)
        tools, most_tokens, stop = _read_options(request)
        sequence, appended = self._continue(messages, tools) or self._begin(messages, tools)
        sequence.is_busy = True
        try:
            room = self._loop.max_response_tokens - len(sequence.response.token_ids) - len(appended)
            turn = await self._sample(sequence, appended, room, most_tokens, stop)
        finally:
            sequence.is_busy = False
        parsed = self._parse(turn, tools)
        self._num_answers += 1
        answer = assistant_message(parsed, self._num_answers)
        new = messages[len(sequence.messages) :]
        if appended:
            append_masked(sequence.response, appended)
        append_turn(sequence.response, turn)
        for message in [*new, answer]:
            sequence.messages.append(message)
            sequence.keys.append(_key(message))
        sequence.answers.append((len(sequence.messages), len(sequence.response.token_ids)))
        self.sequences = [other for other in self.sequences if other is not sequence] + [sequence]
        return _reply(request, answer, parsed, turn, len(sequence.prompt_ids) + len(sequence.response.token_ids))

    def _continue(
        self, messages: list[Message], tools: list[dict[str, Any]]
    ) -> tuple[OpenAISequence, list[int]] | None:
        """Return the sequence that the request goes on with, or a branch of it, and the ids of the new messages."""
        keys = [_key(message) for message in messages]
        found: tuple[int, int, OpenAISequence] | None = None
        for sequence in self.sequences:
            for num_messages, num_tokens in sequence.answers:
                if (
                    len(keys) > num_messages > (found[0] if found else 0)
                    and sequence.tools == tools
                    and sequence.keys[:num_messages] == keys[:num_messages]
                    and all(message["role"] in _APPENDABLE for message in messages[num_messages:])
                ):
                    found = num_messages, num_tokens, sequence
        if found is None:
            return None
        num_messages, num_tokens, sequence = found
        whole = [*sequence.messages[:num_messages], *messages[num_messages:]]
        last_ids = sequence.response.token_ids[num_tokens - 1 : num_tokens]
        appended = self._loop.chat_template.continuation_ids(  # type: ignore[attr-defined]
            whole, num_messages, last_ids, tools or None
        )
        if num_messages == len(sequence.messages) and not sequence.is_busy:
            return sequence, appended
        # A branch: what comes before it is trained in the other sequence, here it is prompt.
        prompt_ids = sequence.prompt_ids + sequence.response.token_ids[:num_tokens] + appended
        return _new_sequence(prompt_ids, whole, keys, tools), []

    def _begin(self, messages: list[Message], tools: list[dict[str, Any]]) -> tuple[OpenAISequence, list[int]]:
        prompt_ids = self._loop.chat_template.render_prompt(messages, tools or None)  # type: ignore[call-arg]
        return _new_sequence(prompt_ids, list(messages), [_key(message) for message in messages], tools), []

    async def _sample(
        self, sequence: OpenAISequence, appended: list[int], room: int, most_tokens: int | None, stop: list[str]
    ) -> Response:
        if room <= 0:
            self.is_exhausted = True
            raise RequestRefused(
                f"The conversation has used its {self._loop.max_response_tokens} tokens "
                "(data.agents.max_response_tokens).",
                code="context_length_exceeded",
            )
        seed = self._sampling.seed
        sampling = replace(
            self._sampling,
            max_tokens=min(room, most_tokens or room, self._sampling.max_tokens),
            stop=[*self._sampling.stop, *stop],
            # Of requests in flight too: equal requests must not sample equal answers.
            seed=None if seed is None else (seed + self._num_requests * _SEED_STEP) % 2**63,
        )
        self._num_requests += 1
        ids = sequence.prompt_ids + sequence.response.token_ids + appended
        output = await self._loop.generate(ids, sampling)
        end_token_ids = self._loop.end_token_ids.union(sampling.stop_token_ids)
        return finish_response(
            cut_at_end(output, end_token_ids),
            end_token_ids=end_token_ids,
            max_tokens=sampling.max_tokens,
            appended_end_token_id=self._loop.appended_end_token_id if sampling.stop else None,
        )

    def _parse(self, turn: Response, tools: list[dict[str, Any]]) -> ParsedMessage:
        tokenizer = self._loop.tokenizer
        if tools:
            parsed = self._parser.parse_ids(turn.token_ids, tokenizer, tools, is_truncated=turn.stop_reason == "length")
            if not parsed.malformed:
                return parsed
        # An unreadable call is shown as the text it is.
        return ParsedMessage(str(tokenizer.decode(turn.token_ids, skip_special_tokens=True)))


def _new_sequence(
    prompt_ids: list[int], messages: list[Message], keys: list[str], tools: list[dict[str, Any]]
) -> OpenAISequence:
    """A sequence that becomes one of the session once it has an answer."""
    return OpenAISequence(
        prompt_ids=prompt_ids, messages=messages, num_prompt_messages=len(messages), keys=keys, tools=tools
    )


def _read_options(request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int | None, list[str]]:
    """Tools, the most tokens and the stop strings of a request."""
    tools = request.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestRefused("'tools' must be a list of function schemas.")
    most_tokens = request.get("max_completion_tokens") or request.get("max_tokens") or None
    if most_tokens is not None and not (isinstance(most_tokens, int) and most_tokens >= 1):
        raise RequestRefused(f"max_tokens={most_tokens!r:.40}: must be a whole number of at least 1.")
    stop = request.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
        raise RequestRefused("'stop' must be a text or a list of texts.")
    return tools, most_tokens, stop


def _read_messages(request: Mapping[str, Any]) -> list[Message]:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("'messages' must be a list of messages, at least one.")
    if request.get("n") not in (None, 1):
        raise RequestRefused(f"n={request['n']}: one answer per request; send several requests.")
    return [_read_message(index, message) for index, message in enumerate(messages)]


def _read_message(index: int, message: Any) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestRefused(f"messages[{index}] has no role.")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") in ("text", "input_text") for part in content):
            raise RequestRefused(f"messages[{index}] holds media, and the policy reads text only.")
        content = "".join(str(part.get("text", "")) for part in content)
    if content is not None and not isinstance(content, str):
        raise RequestRefused(f"messages[{index}].content must be a text or a list of text parts.")
    read: Message = {"role": message["role"], "content": content or ""}
    for name in ("name", "tool_call_id"):
        if message.get(name):
            read[name] = message[name]
    if message.get("tool_calls"):
        try:
            read["tool_calls"] = [_read_call(call) for call in message["tool_calls"]]
        except (KeyError, TypeError, AttributeError):
            raise RequestRefused(
                f"messages[{index}].tool_calls must be a list of {{id, function: {{name, arguments}}}}."
            ) from None
    return read


def _read_call(call: Any) -> dict[str, Any]:
    function = {"name": str(call["function"]["name"]), "arguments": _decoded(call["function"]["arguments"])}
    return {"type": "function", "id": call.get("id"), "function": function}


def _decoded(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _key(message: Message) -> str:
    """A message in the form in which two requests are compared: clients add and drop empty fields."""
    calls = [[call["id"], call["function"]] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"], message.get("tool_call_id"), calls], sort_keys=True)


def _reply(
    request: Mapping[str, Any], answer: Message, parsed: ParsedMessage, turn: Response, num_tokens: int
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer["content"] or None}
    if answer.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "function": {"name": call["function"]["name"], "arguments": text.arguments}}
            for call, text in zip(answer["tool_calls"], parsed.calls, strict=True)
        ]
    reason = "length" if turn.stop_reason == "length" else "tool_calls" if "tool_calls" in message else "stop"
    num_sampled = sum(turn.loss_mask)
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": str(request.get("model") or "policy"),
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
        "usage": {
            "prompt_tokens": num_tokens - len(turn.token_ids),
            "completion_tokens": num_sampled,
            "total_tokens": num_tokens,
        },
    }
