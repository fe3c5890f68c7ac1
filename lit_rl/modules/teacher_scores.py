"""The teachers of a distilling module: checked and started with the run, asked once per iteration.

Position in the flow: rollout -> **teacher scores** (while the old log-probs are scored) -> advantages or loss terms.
The replicas run on the DataModule's runtime, which stops them with everything else; the DataModule does not know them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from lit_rl.experience.batch import Experience
from lit_rl.models import load_tokenizer
from lit_rl.models.loading import max_positions, resolve_model
from lit_rl.serving.teachers import TeacherClient, TeacherManager, TeacherSettings
from lit_rl.types import ScoreOutput


class TeacherScores:
    """Asks the teachers of a run and puts their answers into the experience."""

    def __init__(self, teachers: Mapping[str, TeacherSettings], top_k: int) -> None:
        """Keep the settings.

        Args:
            teachers: By name.
            top_k: Most likely tokens asked for at each place; 0 asks for the sampled token only.
        """
        self.teachers = dict(teachers)
        self.top_k = top_k
        self._manager: TeacherManager | None = None
        self._client: TeacherClient | None = None
        self._loop: Any = None
        self._answers: Future[list[ScoreOutput]] | None = None

    def check(self, policy_name: str, data: Any) -> None:
        """Raise ``ValueError`` where a teacher cannot score what the policy samples.

        Args:
            policy_name: The policy's model.
            data: The DataModule.
        """
        if data is None:
            raise ValueError("Teachers run where the policy's replicas run: fit with a RolloutDataModule.")
        vocabulary = load_tokenizer(policy_name).get_vocab()
        for name, teacher in self.teachers.items():
            told = f"model.teachers: {name!r} ({teacher.model_name})"
            if load_tokenizer(teacher.model_name).get_vocab() != vocabulary:
                raise ValueError(
                    f"{told} has another vocabulary than the policy ({policy_name}): it cannot score its token ids. "
                    "Choose a teacher of the policy's family."
                )
            limit, needed = max_positions(teacher.model_name), data.max_model_len + 1
            served = teacher.serving.max_model_len or needed
            if served < needed or (limit is not None and limit < needed):
                raise ValueError(
                    f"{told} takes {min(served, limit or served)} tokens, but prompt, response and one token that a "
                    f"scoring engine samples are up to {needed}. Lower data.max_prompt_tokens or "
                    "data.max_response_tokens."
                )

    def start(self, data: Any, *, gpu: bool) -> None:
        """Start the replicas on the DataModule's runtime; nothing where they run already.

        Raises:
            EngineStartFailed: Naming the teacher.
        """
        loop = data.runtime.loop
        if self._loop is loop and self._client is not None:
            return
        models = {name: resolve_model(teacher.model_name) for name, teacher in self.teachers.items()}
        manager = TeacherManager(data.runtime, self.teachers, models, data.max_model_len, gpu=gpu, verbose=data.verbose)
        loop.run(manager.start(), timeout_s=manager.start_timeout_s, what=f"{len(models)} teachers to start")
        self._manager, self._client, self._loop = manager, manager.client(), loop

    def forget(self) -> None:
        """Let go of replicas that have ended with their runtime."""
        self._manager = self._client = self._loop = None

    @contextmanager
    def requested(self, experience: Experience) -> Iterator[None]:
        """Have the teachers score in the background; `store` waits for them."""
        if self._client is None:
            raise RuntimeError("The teachers have not been started: is the RolloutDataModule the trainer's datamodule?")
        self._answers = self._loop.submit(self._client.score_all(experience.trajectories, self.top_k))
        try:
            yield
        finally:
            self._answers.cancel()
            self._answers = None

    def store(self, experience: Experience) -> float:
        """Put the answers into columns: ``teacher_logprobs``, and ``teacher_top_ids`` with their log-probs.

        Returns:
            Seconds waited.

        Raises:
            GenerationFailedError: If no replica of a teacher answered; the run can go on from its last checkpoint.
        """
        assert self._answers is not None
        assert self._manager is not None
        started = time.perf_counter()
        answers = self._loop.run(
            _finished(self._answers),
            timeout_s=self._manager.score_timeout_s,
            what=f"teachers to score {len(experience)} trajectories",
        )
        seconds = time.perf_counter() - started
        columns: dict[str, list[torch.Tensor]] = {"teacher_logprobs": []}
        if self.top_k:
            columns |= {"teacher_top_ids": [], "teacher_top_logprobs": []}
        for trajectory, answer in zip(experience.trajectories, answers, strict=True):
            length, scored = len(trajectory.response_ids), len(answer.logprobs)
            logprobs = torch.zeros(length)
            logprobs[:scored] = torch.tensor(answer.logprobs)
            columns["teacher_logprobs"].append(logprobs)
            if self.top_k:
                ids = torch.zeros(length, self.top_k, dtype=torch.int64)
                top_logprobs = torch.zeros(length, self.top_k)
                if scored:
                    ids[:scored] = torch.tensor(answer.top_ids)
                    top_logprobs[:scored] = torch.tensor(answer.top_logprobs)
                columns["teacher_top_ids"].append(ids)
                columns["teacher_top_logprobs"].append(top_logprobs)
        experience.columns |= columns
        return seconds


async def _finished(answers: Future[list[ScoreOutput]]) -> list[ScoreOutput]:
    return await asyncio.wrap_future(answers)
