"""Teachers as a base: they live as long as a fit, and their log-probs are there when advantages are computed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from lit_rl.experience.batch import Experience
from lit_rl.modules.policy_gradient import PolicyGradientModule
from lit_rl.modules.teacher_scores import TeacherScores
from lit_rl.serving.teachers import TeacherSettings, check_teachers, teacher_settings


class TeacherScoredModule(PolicyGradientModule):
    """Scores the experience's column ``teacher_logprobs``, and the teachers' most likely tokens where asked for."""

    def __init__(self, model_name: str, teachers: dict[str, TeacherSettings], top_k: int = 0, **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            teachers: By a name of your choice; served beside the policy's replicas.
            top_k: Most likely tokens asked for at each place; 0 asks for the sampled token only.
            kwargs: Options of `PolicyGradientModule`.
        """
        super().__init__(model_name, **kwargs)
        settings = {name: teacher_settings(teacher) for name, teacher in teachers.items()}
        check_teachers(settings)
        self.teacher_scores = TeacherScores(settings, top_k)

    def check_data(self, data: Any) -> None:
        """Refuse a temperature that the teachers' engines cannot score at."""
        super().check_data(data)
        temperature = data.sampling.temperature if data.sampling is not None else 1.0
        if temperature != 1.0:
            raise ValueError(
                f"data.sampling.temperature={temperature}: teachers score at temperature 1, and a divergence compares "
                "both at the same. Set it to 1."
            )

    def prepare_data(self) -> None:
        """Check the teachers before any engine starts."""
        super().prepare_data()
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.teacher_scores.check(self.model_name, self.trainer.datamodule)  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Start the teachers; the DataModule's runtime is up by now."""
        super().setup(stage)
        if stage == "fit":
            gpu = self.trainer.strategy.root_device.type == "cuda"
            self.teacher_scores.start(self.trainer.datamodule, gpu=gpu)  # type: ignore[attr-defined]

    def teardown(self, stage: str) -> None:
        """The runtime has ended the teachers."""
        self.teacher_scores.forget()

    def score(self, experience: Experience) -> None:
        """Have the teachers score while the networks here do."""
        with self.teacher_scores.requested(experience):
            super().score(experience)

    def score_more(self, experience: Experience) -> None:
        """Take the teachers' answers."""
        super().score_more(experience)
        self.metrics.mean("timing_s/teacher_wait", self.teacher_scores.store(experience))
