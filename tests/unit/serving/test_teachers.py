"""Which teacher scores which trajectory, what is asked of it, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lit_rl.cluster import Runtime
from lit_rl.serving.client import GenerationFailedError
from lit_rl.serving.manager import EngineStartFailed
from lit_rl.serving.settings import ServingSettings
from lit_rl.serving.teachers import TeacherClient, TeacherManager, TeacherSettings, check_teachers, teacher_settings
from lit_rl.types import ScoreOutput, Trajectory


class CountingReplica:
    """Scores every token with minus its id over 100; fails as its ``engine_args`` say."""

    def __init__(self, model: str, settings: ServingSettings, max_model_len: int, rank: int, gpu: bool) -> None:
        self.model = model
        self.asked = settings.engine_args.setdefault("asked", [])
        self.failures = settings.engine_args.get("failures", {}).get(rank, [])

    async def start(self) -> None:
        if self.model == "broken":
            raise RuntimeError("no such file")

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], request_id: str, temperature: float, top_k: int
    ) -> ScoreOutput:
        if self.failures:
            raise self.failures.pop(0)
        self.asked.append((prompt_ids, response_ids, temperature, top_k))
        return ScoreOutput(logprobs=[-token / 100 for token in response_ids], policy_version=-1)

    async def generate(self, *arguments: Any) -> Any:
        raise AssertionError("a teacher scores, it does not generate")

    async def close(self) -> None: ...


def teacher(model: str = "m", sources: list[str] | None = None, replicas: int = 1, **engine_args: Any) -> Any:
    serving = ServingSettings(replica=f"{__name__}.CountingReplica", num_replicas=replicas, engine_args=engine_args)
    return TeacherSettings(model_name=model, data_sources=sources or [], serving=serving)


def trajectory(response: list[int], mask: list[int] | None = None, source: str = "a") -> Trajectory:
    mask = mask or [1] * len(response)
    return Trajectory(
        row_id="r", group_id="g", data_source=source, prompt_ids=[1, 2], response_ids=response, loss_mask=mask,
        rollout_logprobs=[0.0] * len(response), policy_versions=[0] * len(response),
    )  # fmt: skip


def score(teachers: dict[str, TeacherSettings], trajectories: list[Trajectory], top_k: int = 0) -> list[ScoreOutput]:
    with Runtime("inline") as runtime:
        models = {name: teacher.model_name for name, teacher in teachers.items()}
        manager = TeacherManager(runtime, teachers, models, 10, gpu=False)

        async def run() -> list[ScoreOutput]:
            await manager.start()
            try:
                return await manager.client().score_all(trajectories, top_k)
            finally:
                await manager.stop()

        return runtime.loop.run(run(), timeout_s=20.0, what="the test")


def test_each_data_source_is_scored_by_its_teacher_and_the_others_by_the_one_that_names_none() -> None:
    teachers = {"maths": teacher(sources=["gsm8k", "aime"]), "rest": teacher()}

    answers = score(teachers, [trajectory([5], source=s) for s in ("gsm8k", "search", "aime")], top_k=4)

    assert [answer.logprobs for answer in answers] == [[-0.05]] * 3
    asked = {name: teachers[name].serving.engine_args["asked"] for name in teachers}
    assert asked == {"maths": [([1, 2], [5], 1.0, 4)] * 2, "rest": [([1, 2], [5], 1.0, 4)]}


def test_tokens_after_the_last_sampled_one_are_not_scored_and_a_trajectory_without_any_is_not_sent() -> None:
    teachers = {"t": teacher()}

    answers = score(teachers, [trajectory([5, 6, 7, 8], [1, 0, 1, 0]), trajectory([9], [0]), trajectory([])])

    assert [answer.logprobs for answer in answers] == [[-0.05, -0.06, -0.07], [], []]
    assert len(teachers["t"].serving.engine_args["asked"]) == 1


def test_a_replica_that_fails_is_left_for_another_and_one_that_is_alone_is_tried_again() -> None:
    failures = {0: [ConnectionError("gone"), TimeoutError("slow")]}

    for replicas in (1, 2):
        teachers = {"t": teacher(replicas=replicas, failures={0: list(failures[0])})}
        answers = score(teachers, [trajectory([5]), trajectory([6])])
        assert [answer.logprobs for answer in answers] == [[-0.05], [-0.06]]


def test_a_teacher_that_always_fails_raises_its_last_failure() -> None:
    teachers = {"t": teacher(failures={0: [ConnectionError("gone")] * 20})}

    with pytest.raises(GenerationFailedError, match="3 attempts failed, on replicas teacher-t-replica-0.*gone"):
        score(teachers, [trajectory([5])])


def test_a_data_source_without_a_teacher_is_named() -> None:
    client = TeacherClient({"maths": teacher(sources=["gsm8k"])}, {})

    with pytest.raises(ValueError, match=r"'search' has no teacher: model.teachers name \['gsm8k'\]"):
        asyncio.run(client.score_all([trajectory([5], source="search")]))


def test_a_teacher_that_does_not_start_is_named() -> None:
    with pytest.raises(EngineStartFailed, match=r"Teacher 'big' of model.teachers: .*'broken'.*no such file"):
        score({"small": teacher(), "big": teacher("broken", ["a"])}, [])


@pytest.mark.parametrize(
    ("teachers", "words"),
    [
        ({}, "model.teachers is empty"),
        ({"x": teacher(sources=["a"]), "y": teacher(sources=["b", "a"])}, "both 'x' and 'y' teach a"),
        ({"x": teacher(), "y": teacher()}, "both 'x' and 'y' teach every other data source"),
    ],
)
def test_teachers_that_do_not_share_the_rows_out_are_refused(teachers: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_teachers(teachers)


def test_plain_dictionaries_are_settings_too() -> None:
    given = {"model_name": "m", "data_sources": ["a"], "serving": {"num_replicas": 2}}

    settings = teacher_settings(given)

    assert settings == TeacherSettings(model_name="m", data_sources=["a"], serving=ServingSettings(num_replicas=2))
    assert teacher_settings(settings) is settings
