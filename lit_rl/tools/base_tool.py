"""The base class of tools that keep state over a trajectory.

Position in the flow: registry -> **BaseTool** -> ToolSession, which makes exactly one ``create`` and one ``release``
per trajectory and tool, also when the trajectory fails or is cancelled. One tool object serves all trajectories of a
worker: state belongs in a dict keyed by instance id.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from lit_rl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from lit_rl.types import Message


@dataclass(kw_only=True)
class ToolContext:
    """What a tool may know about the trajectory that calls it; passed to methods that take ``agent_data``.

    Attributes:
        row_id: Row of the dataset.
        sample_index: Position within the group.
        turn: Assistant turns so far, from 1.
        messages: The conversation so far; read only.
        state: Free space shared by the tools of one trajectory.
        seed: Seed of the trajectory; ``None`` where it has none.
    """

    row_id: str = ""
    sample_index: int = 0
    turn: int = 0
    messages: list[Message] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def rng(self) -> random.Random:
        """Return a generator that depends on seed, row, sample and turn only."""
        return random.Random(f"{self.seed}/{self.row_id}/{self.sample_index}/{self.turn}")


class BaseTool:
    """A tool with the life cycle create -> execute (any number of times) -> calc_reward -> release.

    Args:
        config: The tool's ``config`` block of the tool YAML, as a plain dict. Understood for every tool:
            ``timeout_s`` (float, seconds, wall clock of one ``execute``; default: the session's),
            ``max_concurrency`` (int, calls at a time in one worker; default: no limit).
        tool_schema: Name, description and parameters; ``None`` takes ``get_openai_tool_schema()``.

    Raises:
        ValueError: If there is no schema.
    """

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config: dict[str, Any] = config or {}
        self.tool_schema: OpenAIFunctionToolSchema | None = tool_schema
        schema = tool_schema or self.get_openai_tool_schema()
        if schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema: give 'tool_schema' in the tool YAML, "
                "or override get_openai_tool_schema()."
            )
        if isinstance(schema, dict):
            schema = OpenAIFunctionToolSchema.model_validate(schema)
        self.tool_schema = schema
        self.name: str = schema.function.name
        self.timeout_s: float | None = self.config.get("timeout_s")
        self.max_concurrency: int | None = self.config.get("max_concurrency")
        # Set by `attach_rate_limits`; has ``lease()``.
        self.rate_limiter: Any = None

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema; override it where the YAML gives none."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Set up the state of one trajectory.

        Args:
            instance_id: Identity to use; ``None`` draws one.
            **kwargs: The row's ``create_kwargs``: as one argument of that name, and each key by its own name.

        Returns:
            The instance id, and a response that is empty unless a subclass has something to show.
        """
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run one call.

        Args:
            instance_id: What ``create`` returned.
            parameters: Arguments, checked against the schema.
            **kwargs: ``agent_data`` (a `ToolContext`) and the row's ``execute_kwargs``.

        Returns:
            The response, a step reward, and metrics.

        Raises:
            NotImplementedError: Unless a subclass overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define execute().")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the whole trajectory, asked for once before ``release``."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the state of one trajectory; called exactly once per ``create``."""

    async def close(self) -> None:
        """Free what the tool object itself holds (connections, processes), when its worker stops."""
