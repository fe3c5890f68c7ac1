"""Settings of the agent-loop workers, and the request that asks for one trajectory.

`AgentSettings` becomes YAML keys (``data.agents.*``); `TrajectoryRequest` travels from the manager to a worker. Nothing
runs here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from lit_rl.metrics.trace import TraceSettings
from lit_rl.types import Prompt


@dataclass(kw_only=True)
class AgentLoopSpec:
    """Which agent loop class to build, and its own options.

    Attributes:
        loop_class: Dotted path of an `AgentLoop` subclass, or ``path/to/file.py:ClassName``.
        options: Keyword arguments of its constructor, beside the ones every loop gets.
    """

    loop_class: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class AgentSettings:
    """How trajectories are rolled out.

    Attributes:
        num_workers: Agent-loop worker processes, at least 1; ``None`` takes ``min(8, CPU cores)``.
        max_concurrent_trajectories: Trajectories one worker runs at once, at least 1.
        default_agent_loop: Loop of rows without ``agent_name``: ``single_turn_agent``, ``tool_agent``,
            ``openai_agent``, a key of ``agent_loops``, the dotted path of an `AgentLoop` subclass, or
            ``path/to/file.py:ClassName``.
        default_options: Constructor options of the default loop.
        agent_loops: Further loops that a row's ``agent_name`` may ask for, by name.
        max_response_tokens: Most tokens after the prompt, tools' included; ``None``: the sampling's ``max_tokens``.
        append_end_token: Append the tokenizer's end token, with mask 0, where a stop string ended the response.
        trajectory_timeout_s: Wall-clock limit of one trajectory, scoring not included, in seconds.
        reward_timeout_s: Longest wait for a reward worker's answer, its queue included, in seconds.
        worker_timeout_s: A worker that reports nothing for this many seconds counts as dead. It reports every 5.
        start_timeout_s: Longest start of the workers, in seconds.
        max_resubmissions: Times a trajectory is started anew after an infrastructure failure, at least 0.
        tool_config_path: YAML file of tools.
        function_tool_path: Python file of function tools.
        interaction_config_path: YAML file of simulated users; see `lit_rl.agents.interactions`.
        chat_template: Jinja text or a ``.jinja`` file instead of the tokenizer's own template; ``None`` keeps that.
        chat_template_kwargs: Further variables of the chat template (``enable_thinking: false``).
        trace: Spans of conversations for a trace viewer; ``None`` is off.
    """

    num_workers: int | None = None
    max_concurrent_trajectories: int = 256
    default_agent_loop: str = "single_turn_agent"
    default_options: dict[str, Any] = field(default_factory=dict)
    agent_loops: dict[str, AgentLoopSpec] = field(default_factory=dict)
    max_response_tokens: int | None = None
    append_end_token: bool = True
    trajectory_timeout_s: float = 1800.0
    reward_timeout_s: float = 600.0
    worker_timeout_s: float = 60.0
    start_timeout_s: float = 180.0
    max_resubmissions: int = 2
    tool_config_path: str | None = None
    function_tool_path: str | None = None
    interaction_config_path: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    trace: TraceSettings | None = None

    def __post_init__(self) -> None:
        """Check what can be checked before anything starts."""
        self.check()

    def resolved_num_workers(self) -> int:
        """Number of workers to start: the configured one, or ``min(8, CPU cores)``."""
        return self.num_workers if self.num_workers is not None else min(8, os.cpu_count() or 1)

    def in_run_folder(self, run_folder: str) -> AgentSettings:
        """The same settings with traces in a run's folder, where they name none."""
        return self if self.trace is None else replace(self, trace=self.trace.in_run_folder(run_folder))

    def with_absolute_paths(self) -> AgentSettings:
        """The same settings for a process with another working folder."""
        return replace(
            self,
            default_agent_loop=_absolute(self.default_agent_loop),
            default_options=_absolute_options(self.default_options),
            agent_loops={
                name: AgentLoopSpec(loop_class=_absolute(spec.loop_class), options=_absolute_options(spec.options))
                for name, spec in self.agent_loops.items()
            },
            tool_config_path=self.tool_config_path and os.path.abspath(self.tool_config_path),
            interaction_config_path=self.interaction_config_path and os.path.abspath(self.interaction_config_path),
            function_tool_path=self.function_tool_path and os.path.abspath(self.function_tool_path),
            chat_template=(
                os.path.abspath(self.chat_template)
                if self.chat_template is not None and self.chat_template.endswith(".jinja")
                else self.chat_template
            ),
        )

    def check(self) -> None:
        """Raise ``ValueError`` where an option is out of its range."""
        for name in ("num_workers", "max_concurrent_trajectories", "max_response_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.agents.{name}={value}: must be at least 1.")
        for name in ("trajectory_timeout_s", "reward_timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:  # NaN is refused too: nothing would ever time out
                raise ValueError(f"data.agents.{name}={getattr(self, name)}: must be a positive number of seconds.")
        if not self.worker_timeout_s >= 10:
            raise ValueError(
                f"data.agents.worker_timeout_s={self.worker_timeout_s}: must be at least 10, workers report every 5."
            )
        if self.trace is not None:
            self.trace.check()
        if self.max_resubmissions < 0:
            raise ValueError(f"data.agents.max_resubmissions={self.max_resubmissions}: must be 0 or more.")


def is_file_spec(loop_class: str) -> bool:
    """Whether a loop class is given as ``path/to/file.py:ClassName``."""
    return ".py:" in loop_class


def _absolute(spec: str) -> str:
    return os.path.abspath(os.path.expanduser(spec)) if is_file_spec(spec) else spec


def _absolute_options(options: dict[str, Any]) -> dict[str, Any]:
    return {name: _absolute(value) if isinstance(value, str) else value for name, value in options.items()}


@dataclass(kw_only=True)
class TrajectoryRequest:
    """One trajectory to roll out.

    Attributes:
        prompt: Row of the dataset.
        group_id: Shared by the trajectories of one prompt in one iteration.
        sample_index: Position within the group, from 0.
        seed: Seed of this trajectory's sampling, derived by the caller; ``None`` leaves it to the engine.
    """

    prompt: Prompt
    group_id: str
    sample_index: int = 0
    seed: int | None = None
