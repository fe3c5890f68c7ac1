"""Whole fits against served teachers, inline: the policy moves to its teacher, and failures are survived or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import MODEL, TinyFit, tiny_data, tiny_fit

from lit_rl.models import load_causal_lm, load_tokenizer
from lit_rl.modules import OnPolicyDistillation
from lit_rl.serving import ServingSettings
from lit_rl.serving.client import GenerationFailedError
from lit_rl.serving.teachers import TeacherSettings
from lit_rl.serving.transformers_replica import TransformersReplica

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="session")
def sharp_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with logits eight times as large: six nats per token from the tiny model itself."""
    network = load_causal_lm(MODEL)
    with torch.no_grad():
        network.model.norm.weight *= 8
    folder = tmp_path_factory.mktemp("sharp")
    network.save_pretrained(folder)
    load_tokenizer(MODEL).save_pretrained(folder)
    return str(folder)


def teacher(folder: str = MODEL, sources: list[str] | None = None, **serving: Any) -> TeacherSettings:
    settings = {"replica": "transformers", "dtype": "float32", **serving}
    return TeacherSettings(model_name=folder, data_sources=sources or [], serving=ServingSettings(**settings))


def distill(policy: str, teachers: dict[str, Any], iterations: int, data: dict[str, Any], **options: Any) -> TinyFit:
    module = OnPolicyDistillation(policy, teachers, **{"actor_lr": 1e-3, **options})
    return tiny_fit(iterations, data=tiny_data(**{"model_name": policy, **data}), module=module)  # type: ignore[arg-type]


def reverse_kl(policy: Any, other: Any, trajectories: list[Any]) -> float:
    """Exact KL(policy || other) at the places of the response tokens, nats per token."""
    total, num_tokens = 0.0, 0
    for trajectory in trajectories:
        ids, first = torch.tensor([trajectory.prompt_ids + trajectory.response_ids]), len(trajectory.prompt_ids)
        with torch.no_grad():
            p, q = (network(ids).logits[0, first - 1 : -1].float().log_softmax(-1) for network in (policy, other))
        total += (p.exp() * (p - q)).sum().item()
        num_tokens += len(trajectory.response_ids)
    return total / num_tokens


def test_the_policy_moves_to_its_teacher_on_its_own_samples(sharp_model: str) -> None:
    size = {"prompts_per_iteration": 4, "max_response_tokens": 8, "serving": {"max_num_seqs": 16}}
    run = distill(sharp_model, {"flat": teacher()}, 10, size, actor_lr=3e-3).fit()

    flat = load_causal_lm(MODEL)
    before = reverse_kl(load_causal_lm(sharp_model), flat, run.iterations[0])
    after = reverse_kl(run.module.actor.network, flat, run.iterations[-1])
    assert before > 6
    assert after < 0.9 * before
    # On-policy, the mean of log p_S - log p_T over the samples estimates it.
    logged = [value for _, value in run.logger.column("distillation/reverse_kl")]
    assert logged[0] == pytest.approx(before, rel=0.2)


def test_forward_kl_reads_the_teachers_most_likely_tokens_also_beside_a_reward(sharp_model: str) -> None:
    options = {"distillation_loss": "forward-kl", "top_k": 16, "reward_coef": 1.0}
    run = distill(MODEL, {"sharp": teacher(sharp_model)}, 2, {}, **options).fit()

    (_, teacher_mass), _ = run.logger.column("distillation/teacher_mass")
    (_, student_mass), _ = run.logger.column("distillation/student_mass")
    assert 0.3 < teacher_mass <= 1
    assert student_mass < 0.1
    (_, loss), _ = run.logger.column("distillation/loss")
    assert loss > 0
    assert max(norm for _, norm in run.logger.column("actor/grad_norm")) > 0


def test_a_teacher_that_fails_now_and_then_changes_nothing(monkeypatch: pytest.MonkeyPatch, sharp_model: str) -> None:
    undisturbed = distill(MODEL, {"sharp": teacher(sharp_model)}, 1, {}).fit().weights()
    score = TransformersReplica.score
    calls = []

    async def fail_every_third(replica: TransformersReplica, *arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) % 3 == 0:
            raise ConnectionError("lost")
        return await score(replica, *arguments, **options)

    monkeypatch.setattr(TransformersReplica, "score", fail_every_third)
    run = distill(MODEL, {"sharp": teacher(sharp_model)}, 1, {})
    run.trainer.callbacks[0].probe_every = 0
    run.fit()

    assert len(calls) > 8
    for name, weight in run.weights().items():
        torch.testing.assert_close(weight, undisturbed[name], msg=name)


def test_a_teacher_that_is_gone_ends_the_run_with_its_error(monkeypatch: pytest.MonkeyPatch, sharp_model: str) -> None:
    async def fail(replica: TransformersReplica, *arguments: Any, **options: Any) -> Any:
        raise ConnectionError("the machine of the teacher is gone")

    monkeypatch.setattr(TransformersReplica, "score", fail)
    run = distill(MODEL, {"sharp": teacher(sharp_model)}, 1, {"prompts_per_iteration": 1, "group_size": 1})
    run.trainer.callbacks[0].probe_every = 0

    with pytest.raises(GenerationFailedError, match="teacher-sharp-replica-0.*the machine of the teacher is gone"):
        run.fit()


def test_a_teacher_that_cannot_score_the_policy_is_refused_before_anything_starts(
    sharp_model: str, tmp_path: Path
) -> None:
    other = load_tokenizer(MODEL)
    other.add_tokens(["<never-heard-of>"])
    other.save_pretrained(tmp_path)
    load_causal_lm(MODEL).save_pretrained(tmp_path)
    too_short = teacher(sharp_model, max_model_len=40)

    for settings, words in ((teacher(str(tmp_path)), "another vocabulary"), (too_short, "takes 40 tokens, but .* 71")):
        run = distill(MODEL, {"t": settings}, 1, {})
        with pytest.raises(ValueError, match=rf"model.teachers: 't' .* {words}"):
            run.fit()
        assert run.data.servers is None
