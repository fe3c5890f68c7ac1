"""The worker that runs agent loops: many conversations at once in one process, each scored as it ends.

Position in the flow: manager -> **worker** -> agent loop -> client. The worker gives every trajectory its identity,
seed and wall-clock limit, and turns what goes wrong into a marked trajectory; one bad sample never ends the others.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lit_rl.agents.agent_loop import AgentLoop, GenerationClient, InfrastructureError
from lit_rl.agents.interactions import load_interactions
from lit_rl.agents.loop_classes import find_loop_class
from lit_rl.agents.policy_text import PolicyText, load_policy_text
from lit_rl.agents.run_tools import load_run_tools
from lit_rl.agents.settings import AgentSettings, TrajectoryRequest
from lit_rl.cluster import WorkerDied, WorkerHandle
from lit_rl.metrics.trace import init_trace, is_row_traced, rollout_trace_attr, shutdown_trace, trace_span
from lit_rl.rewards.client import RewardClient
from lit_rl.rewards.manager import apply_result
from lit_rl.rewards.result import ScoreRequest, error_text
from lit_rl.tools.rate_limit import attach_rate_limits
from lit_rl.tools.session import close_tools
from lit_rl.types import Prompt, SamplingParams, Trajectory

INFRASTRUCTURE = "infrastructure: "
"""Start of `Trajectory.error` where neither row nor user code is at fault; such a trajectory is worth another try."""

_FLUSH_S = 0.15
_HEARTBEAT_S = 5.0
_CANCEL_S = 5.0


class AgentLoopWorker:
    """Runs trajectories as asyncio tasks.

    Args:
        settings: Limits and loop classes.
        client: Sends generation requests.
        policy_text: Local model folder with the tokenizer, or what is otherwise loaded from it.
        reward_handles: Reward workers; without any, trajectories come back unscored.
        rate_limits: Limiter workers of the run by tool name.
    """

    def __init__(
        self,
        settings: AgentSettings,
        client: GenerationClient,
        policy_text: str | PolicyText,
        reward_handles: Sequence[WorkerHandle] = (),
        rate_limits: Mapping[str, WorkerHandle] | None = None,
    ) -> None:
        self._settings = settings
        self._client = client
        if isinstance(policy_text, str):
            policy_text = load_policy_text(policy_text, settings.chat_template_kwargs, settings.chat_template)
        self._text = policy_text
        self._rewards = RewardClient(reward_handles, settings.reward_timeout_s) if reward_handles else None
        if settings.trace is not None:
            init_trace(settings.trace)
        self._tools = load_run_tools(settings)
        path = settings.interaction_config_path
        # A keyword only where there are any: loops of one's own need not know it.
        self._further: dict[str, Any] = {"interactions": load_interactions(path)} if path else {}
        if rate_limits:
            attach_rate_limits(self._tools, rate_limits)
        self._slots = asyncio.Semaphore(settings.max_concurrent_trajectories)
        self._check_loops()

    async def run(
        self, requests: list[TrajectoryRequest], sampling: SamplingParams
    ) -> AsyncIterator[list[tuple[int, Trajectory]]]:
        """Yield ``(position in requests, trajectory)`` in lists, as trajectories end.

        An empty list is a sign of life. Closing the generator cancels what still runs.
        """
        finished: list[tuple[int, Trajectory]] = []
        tasks: set[asyncio.Task[None]] = set()

        async def roll_out(index: int, request: TrajectoryRequest) -> None:
            try:
                trajectory = await self.roll_out(request, sampling)
                # Looked up only now: the list may have been sent and replaced meanwhile.
                finished.append((index, trajectory))
            finally:
                self._slots.release()

        async def spawn() -> None:
            # The slot comes before the task: thousands of waiting requests cost nothing but their own record.
            for index, request in enumerate(requests):
                await self._slots.acquire()
                task = asyncio.create_task(roll_out(index, request))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)

        spawner = asyncio.create_task(spawn())
        num_sent, last_sent = 0, time.monotonic()
        try:
            while num_sent < len(requests):
                await asyncio.wait({spawner}, timeout=_FLUSH_S)
                if finished or time.monotonic() - last_sent > _HEARTBEAT_S:
                    batch, finished = finished, []
                    num_sent, last_sent = num_sent + len(batch), time.monotonic()
                    yield batch
                elif spawner.done():
                    spawner.result()
                    raise RuntimeError(f"{len(requests) - num_sent} trajectories ended without a result.")
        finally:
            spawner.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait({spawner, *tasks}, timeout=_CANCEL_S)

    async def close(self) -> None:
        """Close the tools (one that fails or hangs does not keep the others from it) and write the trace."""
        await close_tools(self._tools)
        if self._settings.trace is not None:
            await asyncio.to_thread(shutdown_trace)

    async def roll_out(self, request: TrajectoryRequest, sampling: SamplingParams) -> Trajectory:
        """Run and score one trajectory; what goes wrong is in its ``error``."""
        row_id = request.prompt.row_id
        is_traced = is_row_traced(row_id)
        with rollout_trace_attr(
            request.sample_index, trace=is_traced, row_id=row_id, group_id=request.group_id, seed=request.seed
        ) as span:
            trajectory = await self._roll_out(request, sampling)
            if is_traced:
                span.set(**_outcome(trajectory))
        return trajectory

    async def _roll_out(self, request: TrajectoryRequest, sampling: SamplingParams) -> Trajectory:
        started, row_id = time.perf_counter(), request.prompt.row_id
        trajectory = await self._converse(request.prompt, request.seed, sampling)
        trajectory.row_id = row_id
        trajectory.group_id = request.group_id
        trajectory.sample_index = request.sample_index
        trajectory.data_source = request.prompt.data_source
        trajectory.seed = request.seed
        if self._rewards is not None and trajectory.error is None and trajectory.reward is None:
            await self._score(self._rewards, request.prompt, trajectory)
        trajectory.metrics["total_s"] = time.perf_counter() - started
        for branch in trajectory.branches:
            branch.row_id, branch.group_id, branch.sample_index = row_id, request.group_id, request.sample_index
            branch.data_source, branch.seed = trajectory.data_source, trajectory.seed
            branch.reward, branch.error = trajectory.reward, trajectory.error
        return trajectory

    async def _converse(self, prompt: Prompt, seed: int | None, sampling: SamplingParams) -> Trajectory:
        limit = asyncio.timeout(self._settings.trajectory_timeout_s)
        if seed is not None:
            sampling = replace(sampling, seed=seed)
        try:
            async with limit:
                loop = self._build_loop(prompt.agent_name, sampling)
                trajectory = await loop.run(prompt, sampling)
            return self._checked(loop, trajectory)
        except (InfrastructureError, WorkerDied, ConnectionError) as error:
            return _failed(prompt, f"{INFRASTRUCTURE}row {prompt.row_id}: {error}")
        except TimeoutError as error:
            if limit.expired():
                limit_s = self._settings.trajectory_timeout_s
                return _failed(
                    prompt, f"Row {prompt.row_id}: not done after data.agents.trajectory_timeout_s={limit_s:g} seconds."
                )
            return _failed(prompt, f"Row {prompt.row_id}:\n{error_text(error)}")
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # user code: loops, tools, templates
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            return _failed(prompt, f"Row {prompt.row_id}:\n{error_text(error)}")

    def _check_loops(self) -> None:
        """Build each configured loop once: a wrong option fails at start, not in every trajectory."""
        for name in (None, *self._settings.agent_loops):
            try:
                self._build_loop(name, SamplingParams())
            except Exception as error:  # user code
                where = "data.agents.default_agent_loop" if name is None else f"data.agents.agent_loops.{name}"
                raise ValueError(f"{where}: {type(error).__name__}: {error}") from error

    def _build_loop(self, agent_name: str | None, sampling: SamplingParams) -> AgentLoop:
        loop_class = find_loop_class(agent_name, self._settings)
        return loop_class.cls(
            client=self._client,
            chat_template=self._text.chat_template,
            tokenizer=self._text.tokenizer,
            max_response_tokens=self._settings.max_response_tokens or sampling.max_tokens,
            end_token_ids=self._text.end_token_ids,
            appended_end_token_id=self._text.tokenizer.eos_token_id if self._settings.append_end_token else None,
            tools=self._tools,
            **self._further,
            **loop_class.options,
        )

    def _checked(self, loop: AgentLoop, trajectory: Trajectory) -> Trajectory:
        """The trajectory with its text, if it is a sound one: loops are user code."""
        if not isinstance(trajectory, Trajectory):
            raise TypeError(f"{type(loop).__name__}.run() must return a Trajectory, not {type(trajectory).__name__}.")
        for sequence in (trajectory, *trajectory.branches):
            sequence.check()
        if not trajectory.text:
            sampled = list(itertools.compress(trajectory.response_ids, trajectory.loss_mask))
            trajectory.text = self._text.decode(sampled)
        return trajectory

    async def _score(self, rewards: RewardClient, prompt: Prompt, trajectory: Trajectory) -> None:
        started = time.perf_counter()
        with trace_span("reward") as span:
            try:
                apply_result(trajectory, await rewards.score(ScoreRequest.from_trajectory(prompt, trajectory)))
            except (WorkerDied, ConnectionError, TimeoutError) as error:
                trajectory.error = f"{INFRASTRUCTURE}row {prompt.row_id}: scoring failed: {error}"
            except Exception as error:  # extra_info that cannot be copied or pickled
                trajectory.error = f"Row {prompt.row_id}: scoring failed:\n{error_text(error)}"
            span.set(reward=trajectory.reward, error=trajectory.error, reward_parts=trajectory.reward_parts)
        trajectory.metrics["score_s"] = time.perf_counter() - started


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    """What a trajectory's span says at its end."""
    oldest, newest = trajectory.version_range
    return {
        "data_source": trajectory.data_source,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "stop_reason": trajectory.stop_reason,
        "num_turns": trajectory.num_turns,
        "prompt_tokens": len(trajectory.prompt_ids),
        "response_tokens": len(trajectory.response_ids),
        "policy_version_min": oldest,
        "policy_version_max": newest,
        "error": trajectory.error,
    }


def _failed(prompt: Prompt, error: str) -> Trajectory:
    return Trajectory(
        row_id=prompt.row_id,
        group_id="",
        prompt_ids=list(prompt.prompt_ids or []),
        response_ids=[],
        loss_mask=[],
        rollout_logprobs=[],
        policy_versions=[],
        error=error,
    )
