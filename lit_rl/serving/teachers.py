"""Teachers of on-policy distillation: other models, served as replicas beside the policy's, that score its tokens.

Position in the flow: an iteration's trajectories -> **TeacherClient** -> a teacher's balancer and replica -> log-probs.
A teacher never learns: no weights are sent to it. What becomes of its log-probs is the module's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_rl.cluster import Runtime
from lit_rl.serving.client import LLMServerClient
from lit_rl.serving.manager import EngineStartFailed, LLMServerManager
from lit_rl.serving.settings import ServingSettings
from lit_rl.types import ScoreOutput, Trajectory


@dataclass(kw_only=True)
class TeacherSettings:
    """One teacher.

    Attributes:
        model_name: A bundled name, a hub id, or a folder; its tokenizer must be the policy's.
        data_sources: Rows it teaches; empty for all those that no other teacher names.
        serving: How its replicas are started. vLLM makes the logits of all tokens of a step at once to score them: on a
            GPU, ``engine_args: {max_num_batched_tokens: ...}`` bounds that memory.
    """

    model_name: str
    data_sources: list[str] = field(default_factory=list)
    serving: ServingSettings = field(default_factory=ServingSettings)


def teacher_settings(given: TeacherSettings | Mapping[str, Any]) -> TeacherSettings:
    """Settings from themselves or, as a notebook may write them, from plain dictionaries."""
    if isinstance(given, TeacherSettings):
        return given
    serving = given.get("serving", {})
    return TeacherSettings(
        **{**given, "serving": serving if isinstance(serving, ServingSettings) else ServingSettings(**serving)}
    )


def check_teachers(teachers: Mapping[str, TeacherSettings]) -> None:
    """Raise ``ValueError`` unless there are teachers and each row has at most one."""
    if not teachers:
        raise ValueError("model.teachers is empty: name at least one, such as teachers: {large: {model_name: ...}}.")
    teacher_of: dict[str, str] = {}
    for name, teacher in teachers.items():
        for source in teacher.data_sources or ["every other data source"]:
            if source in teacher_of:
                raise ValueError(
                    f"model.teachers: both {teacher_of[source]!r} and {name!r} teach {source}. Give each teacher "
                    "data_sources of its own."
                )
            teacher_of[source] = name


class TeacherClient:
    """Asks a trajectory's teacher.

    Args:
        teachers: Settings by name.
        clients: A client of each teacher's replicas, under the same names.
    """

    def __init__(self, teachers: Mapping[str, TeacherSettings], clients: Mapping[str, LLMServerClient]) -> None:
        self._clients = dict(clients)
        self._name_of = {source: name for name, teacher in teachers.items() for source in teacher.data_sources}
        self._default = next((name for name, teacher in teachers.items() if not teacher.data_sources), None)

    def teacher_of(self, data_source: str) -> str:
        """Name of the teacher of a row.

        Raises:
            ValueError: If there is none.
        """
        name = self._name_of.get(data_source, self._default)
        if name is None:
            raise ValueError(
                f"Data source {data_source!r} has no teacher: model.teachers name {sorted(self._name_of)}. Add it to a "
                "teacher's data_sources, or leave those of one teacher empty."
            )
        return name

    async def score(self, trajectory: Trajectory, top_k: int = 0) -> ScoreOutput:
        """Score a trajectory's response up to the last token the policy sampled.

        A replica that fails is left for another; see `LLMServerClient.score`, also for what is raised in the end.
        """
        client = self._clients[self.teacher_of(trajectory.data_source)]
        num_scored = max((i for i, is_sampled in enumerate(trajectory.loss_mask, start=1) if is_sampled), default=0)
        if num_scored == 0:
            return ScoreOutput(logprobs=[], policy_version=0)
        response_ids = trajectory.response_ids[:num_scored]
        # Trajectories of a group share their prompt, but an engine that scores reads no cache: they may spread.
        conversation_id = f"{trajectory.group_id}:{trajectory.sample_index}"
        return await client.score(trajectory.prompt_ids, response_ids, conversation_id, top_k=top_k)

    async def score_all(self, trajectories: Sequence[Trajectory], top_k: int = 0) -> list[ScoreOutput]:
        """Score trajectories at once, which engines batch; the first that fails for good cancels the others."""
        tasks = [asyncio.create_task(self.score(trajectory, top_k)) for trajectory in trajectories]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


class TeacherManager:
    """Starts the replicas of all teachers and hands out a client. The runtime stops them, as all its workers."""

    def __init__(
        self,
        runtime: Runtime,
        teachers: Mapping[str, TeacherSettings],
        models: Mapping[str, str],
        max_model_len: int,
        *,
        gpu: bool,
        verbose: bool = False,
    ) -> None:
        """Keep what is needed; `start` starts the engines.

        Args:
            runtime: Where replicas run.
            teachers: Settings by name.
            models: Local folder or hub id that each teacher's replicas load.
            max_model_len: Longest prompt plus response in tokens that the policy may sample.
            gpu: Whether replicas take GPUs.
            verbose: Show the engines' own logs.
        """
        self.teachers = dict(teachers)
        self._managers = {
            name: LLMServerManager(
                runtime,
                teacher.serving,
                models[name],
                # An engine that scores samples one token, too.
                teacher.serving.max_model_len or max_model_len + 1,
                gpu=gpu,
                verbose=verbose,
                prefix=f"teacher-{name}-",
            )
            for name, teacher in self.teachers.items()
        }

    @property
    def start_timeout_s(self) -> float:
        """Longest wait for `start`, in seconds."""
        return max(teacher.serving.start_timeout_s for teacher in self.teachers.values()) + 60.0

    @property
    def score_timeout_s(self) -> float:
        """Longest wait for the scores of an iteration, in seconds: all attempts of the slowest teacher."""
        return 3 * max(teacher.serving.request_timeout_s for teacher in self.teachers.values()) + 60.0

    async def start(self) -> None:
        """Start all teachers at once.

        Raises:
            EngineStartFailed: Naming the teacher.
        """

        async def start(name: str, manager: LLMServerManager) -> None:
            try:
                await manager.start()
            except EngineStartFailed as error:
                raise EngineStartFailed(f"Teacher {name!r} of model.teachers: {error}") from error

        results = await asyncio.gather(*(start(*item) for item in self._managers.items()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.stop()
                raise result

    def client(self) -> TeacherClient:
        """A client of all teachers."""
        return TeacherClient(self.teachers, {name: manager.client() for name, manager in self._managers.items()})

    async def stop(self) -> None:
        """Stop all teachers' processes; safe to call twice."""
        await asyncio.gather(*(manager.stop() for manager in self._managers.values()))
