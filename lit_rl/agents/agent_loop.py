"""Base class of agent loops: the conversation of one sample with the policy and its environment.

Position in the flow: manager -> worker -> **agent loop** -> client -> replica. A worker builds a fresh object for every
sample, so a loop may keep state in attributes. It returns flat token lists; scoring, seeds, identity and failures are
the worker's job.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from lit_rl.agents.response import Response
from lit_rl.cluster import WorkerDied
from lit_rl.metrics.trace import Span, trace_span
from lit_rl.types import Message, Prompt, SamplingParams, TokenOutput, Trajectory


class GenerationClient(Protocol):
    """Where tokens come from; `lit_rl.serving.LLMServerClient` in a run."""

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        """Sample a continuation of ``prompt_ids``."""
        ...


class PromptRenderer(Protocol):
    """What a loop needs of `lit_rl.data.chat_template.ChatTemplate`."""

    def render_prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of the conversation with the header of the policy's next message."""
        ...


class InfrastructureError(RuntimeError):
    """No replica could answer. Neither row nor user code is at fault, so the trajectory is started again elsewhere."""


class AgentLoop(ABC):
    """One conversation. Subclasses implement `run`.

    Args:
        client: Sends one generation request per turn.
        chat_template: Renders messages to token ids.
        tokenizer: Tokenizer of the policy, for decoding.
        max_response_tokens: Most tokens after the prompt, tool tokens included.
        end_token_ids: Every id that ends a response.
        appended_end_token_id: End token to add, with mask 0, where a stop string ended a response; ``None`` adds none.
        tools: Tools by name.
        interactions: Simulated users by name.
        conversation_id: Key of sticky routing; a random one by default.
    """

    def __init__(
        self,
        *,
        client: GenerationClient,
        chat_template: PromptRenderer,
        max_response_tokens: int,
        tokenizer: Any = None,
        end_token_ids: frozenset[int] = frozenset(),
        appended_end_token_id: int | None = None,
        tools: Mapping[str, Any] | None = None,
        interactions: Mapping[str, Any] | None = None,
        conversation_id: str | None = None,
    ) -> None:
        self.client = client
        self.chat_template = chat_template
        self.tokenizer = tokenizer
        self.max_response_tokens = max_response_tokens
        self.end_token_ids = end_token_ids
        self.appended_end_token_id = appended_end_token_id
        self.tools = tools or {}
        self.interactions = interactions or {}
        self.conversation_id = conversation_id or uuid.uuid4().hex
        self.metrics: dict[str, float] = {"generate_s": 0.0, "num_preempted": 0.0}

    @classmethod
    def shown_schemas(
        cls, tools: Mapping[str, Any], prompt: Prompt, options: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Tool schemas that this kind of loop renders into the prompt of a row; the overlong filter counts them.

        Args:
            tools: Tools of the run, by name.
            prompt: The row.
            options: The loop's own constructor options.

        Returns:
            OpenAI function schemas. This base class shows none.
        """
        return []

    @abstractmethod
    async def run(self, prompt: Prompt, sampling: SamplingParams) -> Trajectory:
        """Hold the conversation and return it as a trajectory.

        Args:
            prompt: The row. Its messages belong to all samples of a group: do not change them.
            sampling: With this sample's own seed. ``max_tokens`` counts over all turns.

        Returns:
            A trajectory, most easily from `build_trajectory`. ``reward`` stays ``None`` unless the loop itself scores.
        """

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams) -> TokenOutput:
        """Sample one turn; time and preemptions are added to `metrics`.

        Raises:
            InfrastructureError: If no replica could answer.
            ValueError: From the replica, such as a prompt longer than the model.
        """
        started = time.perf_counter()
        with trace_span("generate", prompt_tokens=len(prompt_ids), max_tokens=sampling.max_tokens) as span:
            try:
                output = await self.client.generate(prompt_ids, sampling, self.conversation_id)
            except (WorkerDied, ConnectionError, TimeoutError) as error:
                raise InfrastructureError(f"generate failed with {type(error).__name__}: {error}") from error
            finally:
                self.metrics["generate_s"] += time.perf_counter() - started
            if span.is_on:
                self._describe_output(span, prompt_ids, output)
        self.metrics["num_preempted"] += output.num_preempted
        return output

    def _describe_output(self, span: Span, prompt_ids: list[int], output: TokenOutput) -> None:
        span.set(
            response_tokens=len(output.token_ids),
            stop_reason=output.stop_reason,
            policy_version_min=min(output.policy_versions, default=None),
            policy_version_max=max(output.policy_versions, default=None),
            num_preempted=output.num_preempted,
        )
        if span.with_text and self.tokenizer is not None:
            span.set(
                prompt_text=self.tokenizer.decode(prompt_ids, skip_special_tokens=False),
                response_text=self.tokenizer.decode(output.token_ids, skip_special_tokens=False),
            )

    def render_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of the row's prompt: the ones the dataset measured, else rendered now."""
        if prompt.prompt_ids is not None:
            return list(prompt.prompt_ids)
        return self.chat_template.render_prompt(prompt.messages)

    def build_trajectory(
        self,
        prompt: Prompt,
        prompt_ids: list[int],
        response: Response,
        *,
        num_turns: int = 2,
        messages: list[Message] | None = None,
    ) -> Trajectory:
        """Trajectory of this conversation; the worker adds group, sample index and seed."""
        return Trajectory(
            row_id=prompt.row_id,
            group_id="",
            data_source=prompt.data_source,
            prompt_ids=prompt_ids,
            response_ids=response.token_ids,
            loss_mask=response.loss_mask,
            rollout_logprobs=response.logprobs,
            policy_versions=response.policy_versions,
            stop_reason=response.stop_reason,
            num_turns=num_turns,
            messages=messages or [],
            metrics=self.metrics,
        )
