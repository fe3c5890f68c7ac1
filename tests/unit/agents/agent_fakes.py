"""Small real classes that stand in for tokenizer, chat template and serving client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lit_rl.agents import AgentLoop, TrajectoryRequest
from lit_rl.agents.policy_text import PolicyText
from lit_rl.agents.response import Response
from lit_rl.types import Message, Prompt, SamplingParams, TokenOutput, Trajectory

END = 2


class LetterTokenizer:
    """Id 10 is "a", 11 is "b", ...; ids below 10 are special."""

    eos_token_id = END

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i - 10) for i in token_ids if i >= 10 or not skip_special_tokens)


class LetterTemplate:
    def render_prompt(self, messages: list[Message]) -> list[int]:
        return [10 + ord(letter) - ord("a") for message in messages for letter in message["content"]]


def letters() -> PolicyText:
    return PolicyText(tokenizer=LetterTokenizer(), chat_template=LetterTemplate(), end_token_ids=frozenset({END, 7}))


class EchoClient:
    """Answers with the prompt's ids and an end token, after an optional delay; keeps what it was asked."""

    def __init__(self, delay_s: float = 0.0, fail: Callable[[list[int]], Exception | None] = lambda ids: None) -> None:
        self.delay_s = delay_s
        self.fail = fail
        self.calls: list[tuple[list[int], SamplingParams, str]] = []

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        self.calls.append((prompt_ids, sampling, conversation_id))
        await asyncio.sleep(self.delay_s)
        error = self.fail(prompt_ids)
        if error is not None:
            raise error
        return answer([*prompt_ids, END])


class FixedClient:
    """Gives the same answer to everyone."""

    def __init__(self, output: TokenOutput) -> None:
        self.output = output

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        return self.output


class NeverEndingLoop(AgentLoop):
    cancelled: list[str] = []

    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.append(prompt.row_id)
            raise
        raise AssertionError("unreachable")


class ScoringLoop(AgentLoop):
    """Scores itself, with a number given in its options."""

    def __init__(self, *, reward: float, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.reward = reward

    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        empty = Response(token_ids=[], loss_mask=[], logprobs=[], policy_versions=[], stop_reason="stop")
        trajectory = self.build_trajectory(prompt, [1], empty)
        trajectory.reward = self.reward
        return trajectory


class FaultyLoop(AgentLoop):
    """Raises or returns what its options say."""

    def __init__(self, *, fault: object, **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.fault = fault

    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        if isinstance(self.fault, BaseException):
            raise self.fault
        return self.fault  # type: ignore[return-value]


def answer(token_ids: list[int], stop_reason: str = "stop") -> TokenOutput:
    return TokenOutput(
        token_ids=list(token_ids),
        logprobs=[-0.5] * len(token_ids),
        stop_reason=stop_reason,  # type: ignore[arg-type]
        policy_versions=[3] * len(token_ids),
    )


def request(text: str, sample_index: int = 0, **row: object) -> TrajectoryRequest:
    prompt = Prompt(
        row_id=f"row-{text}",
        messages=[{"role": "user", "content": text}],
        data_source="letters",
        **row,  # type: ignore[arg-type]
    )
    return TrajectoryRequest(prompt=prompt, group_id=f"group-{text}", sample_index=sample_index)
