"""The agent loop with tools: sample, run the calls, append their answers, sample again.

Position in the flow: worker -> **ToolAgentLoop** -> ToolSession and client. Sampled ids are kept as they are; each
round appends only the ids of the new messages, with mask 0. Whatever the policy does wrong (unknown tool, bad
arguments, unreadable call, too many calls) is answered and counted. The last token of a trajectory is always the
policy's, so that a terminal reward reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from lit_rl.agents.agent_loop import AgentLoop
from lit_rl.agents.interactions import UserSession, find_interaction
from lit_rl.agents.response import (
    Response,
    append_masked,
    append_turn,
    cut_at_end,
    empty_response,
    finish_response,
)
from lit_rl.agents.run_tools import select_tools, tool_schemas
from lit_rl.agents.tool_messages import TruncateSide, assistant_message, call_id, tool_message, truncate_text
from lit_rl.agents.tool_parsers import ParsedMessage, get_tool_parser
from lit_rl.metrics.trace import trace_span
from lit_rl.tools.base_tool import ToolContext
from lit_rl.tools.session import Tool, ToolResult, ToolSession
from lit_rl.types import Message, Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

# An odd constant: sampling of later turns must not repeat the random numbers of the first.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(kw_only=True)
class _Conversation:
    """What a conversation consists of; ``response`` and ``messages`` grow."""

    prompt_ids: list[int]
    messages: list[Message]
    session: ToolSession
    user: UserSession | None
    schemas: list[dict[str, Any]]
    sampling: SamplingParams
    limit: int
    response: Response = field(default_factory=empty_response)


class ToolAgentLoop(AgentLoop):
    """A conversation with tools. Its name in a row's ``agent_name`` is ``tool_agent``.

    A row may narrow the tools with ``extra_info.tool_selection`` (list of names; empty means all) and give them
    arguments with ``extra_info.tools_kwargs``. With ``extra_info.interaction_kwargs`` a simulated user answers the
    messages that call no tool.

    Args:
        tool_parser: Format of the calls; see `get_tool_parser`.
        max_assistant_turns: The turn of this number ends the conversation, its calls are not run; ``None``: no limit.
        max_user_turns: After this many rounds of tool answers the next turn is the last; ``None``: no limit.
        max_parallel_calls: Calls of one message that are run, at least 1; further ones are answered with a refusal.
        max_tool_response_tokens: Longest answer of one call, tokens; longer ones are cut and marked. ``None``: half of
            ``max_response_tokens``.
        tool_response_truncate_side: ``left``, ``right`` or ``middle``: what of a long answer is left out.
        max_consecutive_invalid_calls: So many wrong calls in a row end the conversation; ``None``: no limit.
        tool_timeout_s: Wall clock of one call in seconds, where the tool sets none.
        tool_media: What becomes of images and videos in a tool's answer: ``refuse`` fails the trajectory, ``keep`` puts
            them into its ``media`` and shows the policy ``[image]`` or ``[video]`` instead.
        score_with_tools: Train on the tools' own rewards (all step rewards and each ``calc_reward``) and the simulated
            user's scores instead of a scorer.
        **kwargs: See `AgentLoop`.

    Raises:
        ValueError: For an option out of its range.
    """

    def __init__(
        self,
        *,
        tool_parser: str = "hermes",
        max_assistant_turns: int | None = None,
        max_user_turns: int | None = None,
        max_parallel_calls: int = 1,
        max_tool_response_tokens: int | None = None,
        tool_response_truncate_side: TruncateSide = "middle",
        max_consecutive_invalid_calls: int | None = None,
        tool_timeout_s: float = 60.0,
        tool_media: Literal["refuse", "keep"] = "refuse",
        score_with_tools: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if max_parallel_calls < 1:
            raise ValueError(f"max_parallel_calls={max_parallel_calls}: must be at least 1.")
        if max_tool_response_tokens is not None and max_tool_response_tokens < 1:
            raise ValueError(f"max_tool_response_tokens={max_tool_response_tokens}: must be at least 1.")
        if tool_response_truncate_side not in get_args(TruncateSide):
            raise ValueError(
                f"tool_response_truncate_side={tool_response_truncate_side!r}: must be one of {get_args(TruncateSide)}."
            )
        self.parser = get_tool_parser(tool_parser)
        self.max_assistant_turns = max_assistant_turns
        self.max_user_turns = max_user_turns
        self.max_parallel_calls = max_parallel_calls
        self.max_tool_response_tokens = max_tool_response_tokens or max(1, self.max_response_tokens // 2)
        self.tool_response_truncate_side: TruncateSide = tool_response_truncate_side
        self.max_consecutive_invalid_calls = max_consecutive_invalid_calls
        self.tool_timeout_s = tool_timeout_s
        if tool_media not in ("refuse", "keep"):
            raise ValueError(f"tool_media={tool_media!r}: must be 'refuse' or 'keep'.")
        self.tool_media = tool_media
        self.media: dict[str, list[Any]] = {}
        self.score_with_tools = score_with_tools
        self.tool_rewards: list[float] = []
        self.turn_rewards: list[float] = []
        self._assistant_turns = 0
        self._user_turns = 0
        self._consecutive_invalid_calls = 0

    @classmethod
    def shown_schemas(
        cls, tools: Mapping[str, Tool], prompt: Prompt, options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Schemas of the tools that the row selects."""
        return tool_schemas(select_tools(tools, prompt))

    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        """Hold the conversation.

        Raises:
            ValueError: If the row's ``tools_kwargs`` cannot be used, or a tool answers a text-only policy with media.
            RuntimeError: If a tool's ``calc_reward`` or the simulated user failed.
        """
        tools = select_tools(self.tools, prompt)
        schemas = tool_schemas(tools)
        session = ToolSession(
            tools,
            ToolContext(row_id=prompt.row_id, messages=list(prompt.messages), seed=sampling.seed),
            prompt.extra_info.get("tools_kwargs"),
            known_tools=self.tools,
            timeout_s=self.tool_timeout_s,
        )
        if prompt.extra_info.get("need_tools_kwargs") and not session.tools_kwargs:
            logger.warning("Row %s: need_tools_kwargs is set, but tools_kwargs is empty.", prompt.row_id)
        interaction = find_interaction(self.interactions, prompt)
        user = None if interaction is None else UserSession(interaction, prompt, self.tool_timeout_s)
        chat = _Conversation(
            prompt_ids=self._render_prompt(prompt, schemas),
            messages=session.context.messages,
            session=session,
            user=user,
            schemas=schemas,
            sampling=sampling,
            limit=min(sampling.max_tokens, self.max_response_tokens),
        )
        async with session, user or contextlib.nullcontext():
            goes_on = True
            while goes_on:
                with trace_span("turn", number=self._assistant_turns + 1):
                    goes_on = await self._take_turn(chat)
            final_rewards = await session.final_rewards()
            user_score = 0.0 if user is None else await user.final_score()
        for name, amount in [*session.metrics.items(), *(user.metrics.items() if user else ())]:
            self.metrics[name] = self.metrics.get(name, 0.0) + amount
        trajectory = self.build_trajectory(
            prompt,
            chat.prompt_ids,
            chat.response,
            num_turns=self._user_turns + self._assistant_turns + 1,
            messages=chat.messages[len(prompt.messages) :],
        )
        trajectory.media = self.media
        self._add_rewards(trajectory, final_rewards)
        if user is not None:
            trajectory.reward_parts |= {"user_turn_score": sum(user.turn_scores), "user_score": user_score}
            if trajectory.reward is not None:
                trajectory.reward += sum(user.turn_scores) + user_score
        return trajectory

    async def _take_turn(self, chat: _Conversation) -> bool:
        """Let the policy speak and answer it; returns whether the conversation goes on."""
        response, messages, limit = chat.response, chat.messages, chat.limit
        turn = await self._generate_turn(chat)
        append_turn(response, turn)
        self._assistant_turns += 1
        parsed = self.parser.parse_ids(
            turn.token_ids, self.tokenizer, chat.schemas, is_truncated=turn.stop_reason == "length"
        )
        if turn.stop_reason != "stop" or len(response.token_ids) >= limit:
            # Nothing of a cut message is run: half a call teaches nonsense.
            messages.append({"role": "assistant", "content": parsed.content})
            return False
        messages.append(assistant_message(parsed, self._assistant_turns))
        has_calls = bool(parsed.calls or parsed.malformed)
        if not has_calls and chat.user is None:
            return False
        if _is_reached(self._assistant_turns, self.max_assistant_turns) or _is_reached(
            self._user_turns, self.max_user_turns
        ):
            self.metrics["ended_by_max_turns"] = 1.0
            return False
        answers = await self._answer(parsed, chat.session) if has_calls else await _ask(chat)
        if not answers:
            return False
        if _is_reached(self._consecutive_invalid_calls, self.max_consecutive_invalid_calls):
            self.metrics["ended_by_invalid_calls"] = 1.0
            return False
        appended = self.chat_template.continuation_ids(  # type: ignore[attr-defined]
            [*messages, *answers], len(messages), turn.token_ids, chat.schemas or None
        )
        if len(response.token_ids) + len(appended) >= limit:
            # Neither tokens nor messages of this round are kept, so that both say the same.
            self.metrics["ended_by_tool_response"] = 1.0
            response.stop_reason = "length"
            return False
        messages.extend(answers)
        self._user_turns += 1
        append_masked(response, appended)
        return True

    async def _generate_turn(self, chat: _Conversation) -> Response:
        sampling, response = chat.sampling, chat.response
        max_tokens = chat.limit - len(response.token_ids)
        seed = sampling.seed
        if seed is not None and self._assistant_turns:
            seed = (seed + self._assistant_turns * _SEED_STEP) % 2**63
        output = await self.generate(
            chat.prompt_ids + response.token_ids, replace(sampling, max_tokens=max_tokens, seed=seed)
        )
        end_token_ids = self.end_token_ids.union(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            output = cut_at_end(output, end_token_ids)
        return finish_response(
            output,
            end_token_ids=end_token_ids,
            max_tokens=max_tokens,
            ignore_eos=sampling.ignore_eos,
            appended_end_token_id=self.appended_end_token_id if sampling.stop else None,
        )

    async def _answer(self, parsed: ParsedMessage, session: ToolSession) -> list[Message]:
        """Run the calls of one message; returns one tool message per call, in order, then one per unreadable call."""
        turn = session.context.turn = self._assistant_turns
        run = parsed.calls[: self.max_parallel_calls]
        results = await asyncio.gather(*(session.call(call.name, call.arguments) for call in run))
        self.turn_rewards += [0.0] * (self._assistant_turns - 1 - len(self.turn_rewards))  # turns without a call
        self.turn_rewards.append(sum(result.reward for result in results))
        answers = []
        for index, (call, result) in enumerate(zip(run, results, strict=True)):
            self.tool_rewards.append(result.reward)
            self._consecutive_invalid_calls = self._consecutive_invalid_calls + 1 if result.is_invalid else 0
            answers.append(tool_message(call.name, self._shorten(result, session), call_id(call, turn, index)))
        for index, call in enumerate(parsed.calls[len(run) :], start=len(run)):
            self._count("num_refused_calls")
            text = f"Not run: at most {self.max_parallel_calls} tool call(s) per message. Call again if still needed."
            answers.append(tool_message(call.name, text, call_id(call, turn, index)))
        for index, reason in enumerate(parsed.malformed, start=len(parsed.calls)):
            session.count_malformed()
            self.tool_rewards.append(0.0)
            self._consecutive_invalid_calls += 1
            answers.append(tool_message("tool", f"Malformed tool call: {reason}.", call_id(None, turn, index)))
        return answers

    def _shorten(self, result: ToolResult, session: ToolSession) -> str:
        if result.image or result.video:
            self._keep_media(result, session)
        text = truncate_text(
            result.text, self.max_tool_response_tokens, self.tool_response_truncate_side, self.tokenizer
        )
        if text is not result.text:
            self._count("num_truncated_tool_responses")
        # After the cut, so that no placeholder is lost.
        return "".join([*("[image]" for _ in result.image), *("[video]" for _ in result.video), text])

    def _keep_media(self, result: ToolResult, session: ToolSession) -> None:
        if self.tool_media == "refuse":
            raise ValueError(
                f"Row {session.context.row_id}: a tool answered with images or video, and the policy reads text only. "
                "Take a text tool, or set tool_media: keep, which shows the policy [image] and hands the image to the "
                "reward function."
            )
        for kind, items in (("image", result.image), ("video", result.video)):
            if items:
                self.media.setdefault(kind, []).extend(items)

    def _render_prompt(self, prompt: Prompt, schemas: list[dict[str, Any]]) -> list[int]:
        # The dataset has measured the prompt with the template's own tools.
        if schemas == (getattr(self.chat_template, "tools", None) or []):
            return self.render_prompt(prompt)
        return self.chat_template.render_prompt(prompt.messages, schemas)  # type: ignore[call-arg]

    def _add_rewards(self, trajectory: Trajectory, final_rewards: dict[str, float]) -> None:
        if self.tool_rewards:
            trajectory.reward_parts["tool_reward"] = sum(self.tool_rewards)
        for name, reward in final_rewards.items():
            trajectory.reward_parts[f"tool_reward/{name}"] = reward
        if self.score_with_tools:
            trajectory.reward = sum(self.tool_rewards) + sum(final_rewards.values())
            trajectory.turn_rewards = self.turn_rewards

    def _count(self, name: str) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + 1.0


async def _ask(chat: _Conversation) -> list[Message]:
    """Return the simulated user's message, none where the user ends the conversation."""
    assert chat.user is not None
    text = await chat.user.reply(chat.messages)
    return [] if text is None else [{"role": "user", "content": text}]


def _is_reached(count: int, limit: int | None) -> bool:
    return bool(limit) and count >= (limit or 0)
