"""Reward models that the run serves itself, inline; tests/integration/test_reward_models_over_ray.py has processes."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_classifier import save_tiny_classifier, tiny_score

from lit_rl.cluster import Runtime
from lit_rl.models import load_causal_lm, load_tokenizer
from lit_rl.rewards import RewardLoopManager, RewardModelSettings, RewardPart, RewardSettings
from lit_rl.rewards.served_models import ServedRewardModel
from lit_rl.serving import ServingSettings
from lit_rl.serving.manager import EngineStartFailed
from lit_rl.types import Prompt, Trajectory

JUDGE = "bundled/tiny-random"
MESSAGES = [{"role": "user", "content": "What is 6 * 7?"}]


def serving(**changes: Any) -> ServingSettings:
    return ServingSettings(**({"replica": "transformers", "dtype": "float32", "threads_per_replica": 1} | changes))


def score_all(settings: RewardSettings, texts: list[str]) -> list[Trajectory]:
    """Score answers to one question with a manager of its own."""
    prompt = Prompt(row_id="7", messages=list(MESSAGES), data_source="test", ground_truth="42")
    trajectories = [
        Trajectory(
            row_id="7",
            group_id="g",
            prompt_ids=[],
            response_ids=[1],
            loss_mask=[1],
            rollout_logprobs=[0.0],
            policy_versions=[0],
            text=text,
        )
        for text in texts
    ]
    with Runtime("inline") as runtime:
        manager = RewardLoopManager(runtime, settings)
        try:
            runtime.loop.run(manager.start(), timeout_s=120, what="the start")
            runtime.loop.run(manager.score_batch([prompt] * len(texts), trajectories), timeout_s=120, what="the scores")
        finally:
            runtime.loop.run(manager.stop(), timeout_s=60, what="the stop")
    return trajectories


def test_judge_and_classifier_are_served_and_reach_the_functions(tmp_path: Path) -> None:
    folder = save_tiny_classifier(tmp_path / "classifier")

    async def asks_the_judge(solution_str: str, models: dict[str, Any]) -> dict[str, Any]:
        ids = load_tokenizer(JUDGE)(await models["judge"].generate(MESSAGES, max_tokens=5)).input_ids
        return {"score": 1.0, "num_ids": len(ids)}

    settings = RewardSettings(
        models={
            "judge": RewardModelSettings(model_name=JUDGE, max_model_len=128, serving=serving()),
            "rm": RewardModelSettings(
                model_name=folder, kind="classifier", max_model_len=128, serving=serving(num_replicas=2)
            ),
        },
        parts=[
            RewardPart(name="quality", function="lit_rl.rewards.reward_model:compute_score", kwargs={"model": "rm"}),
            RewardPart(name="judged", function=asks_the_judge, weight=0.0),
        ],
        num_workers=2,
    )
    texts = ["42", "I do not know.", "It is 42, since six times seven is that.", "42"]
    trajectories = score_all(settings, texts)
    assert [trajectory.error for trajectory in trajectories] == [None] * 4
    expected = [tiny_score(folder, [*MESSAGES, {"role": "assistant", "content": text}]) for text in texts]
    assert [trajectory.reward for trajectory in trajectories] == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in expected}) == 3
    assert all(trajectory.reward_parts["judged/num_ids"] >= 1 for trajectory in trajectories)


def test_a_begin_token_is_there_once_whoever_writes_it() -> None:
    """As in Llama's: the template writes it, and the tokenizer adds it by itself."""
    from tokenizers.processors import TemplateProcessing

    asked: list[list[int]] = []

    class Client:
        async def classify(self, token_ids: list[int]) -> list[float]:
            asked.append(token_ids)
            return [0.5]

    tokenizer = copy.deepcopy(load_tokenizer(JUDGE))
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, begin)]
    )
    tokenizer.chat_template = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
    with pytest.MonkeyPatch.context() as patch:
        for module in ("served_models", "reward_model"):
            patch.setattr(f"lit_rl.rewards.{module}.load_tokenizer", lambda path: tokenizer)
        model = ServedRewardModel("rm", "classifier", "anywhere", Client())  # type: ignore[arg-type]
        assert asyncio.run(model.classify([*MESSAGES, {"role": "assistant", "content": "42"}])) == [0.5]
        with pytest.raises(TypeError, match=r"models\.rm is of kind 'classifier': generate\(\) needs kind: generative"):
            asyncio.run(model.generate(MESSAGES))
    assert asked == [[begin, *load_tokenizer(JUDGE).encode("What is 6 * 7?42", add_special_tokens=False)]]


def test_the_judge_writes_greedily_what_the_model_would() -> None:
    seen: list[str] = []

    async def keep(solution_str: str, models: dict[str, Any]) -> float:
        seen.append(await models["judge"].generate(MESSAGES, max_tokens=6))
        return 0.0

    model = RewardModelSettings(model_name=JUDGE, max_model_len=128, serving=serving())
    score_all(RewardSettings(function=keep, models={"judge": model}, num_workers=1), ["x"])
    tokenizer, network = load_tokenizer(JUDGE), load_causal_lm(JUDGE)
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    output = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert seen == [tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)]


def test_a_judgement_without_grade_fails_its_score_and_is_no_zero() -> None:
    settings = RewardSettings(
        function="lit_rl.rewards.judge:compute_score",
        kwargs={"model": "judge", "max_tokens": 4},
        models={"judge": RewardModelSettings(model_name=JUDGE, max_model_len=512, serving=serving())},
        num_workers=1,
    )
    (trajectory,) = score_all(settings, ["42"])
    assert trajectory.reward is None
    assert "Judge judge: the judgement has no grade" in str(trajectory.error)


def test_a_conversation_too_long_for_the_reward_model_fails_its_score_only(tmp_path: Path) -> None:
    model = RewardModelSettings(
        model_name=save_tiny_classifier(tmp_path), kind="classifier", max_model_len=64, serving=serving()
    )
    function = "lit_rl.rewards.reward_model:compute_score"
    settings = RewardSettings(function=function, kwargs={"model": "rm"}, models={"rm": model}, num_workers=1)
    long, short = score_all(settings, ["42 " * 90, "42"])
    assert "the reward model reads 1 to 64" in str(long.error)
    assert (long.reward, short.error) == (None, None)


def test_a_language_model_is_refused_as_a_classifier() -> None:
    """Transformers would only warn and score with a random head."""
    model = RewardModelSettings(model_name=JUDGE, kind="classifier", max_model_len=64, serving=serving())
    function = "lit_rl.rewards.reward_model:compute_score"
    settings = RewardSettings(function=function, kwargs={"model": "rm"}, models={"rm": model}, num_workers=1)
    with pytest.raises(
        EngineStartFailed, match=r"data\.rewards\.models\.rm: .*is no trained sequence classifier.*score"
    ):
        score_all(settings, ["42"])


async def takes_models(solution_str: str, models: dict[str, Any]) -> float:
    return float(len(models))


def takes_none(solution_str: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": takes_none}, "no reward function takes the keyword `models`, so judge would be started"),
        (
            {"function": "lit_rl.rewards.judge:compute_score", "kwargs": {"model": "jugde"}},
            r"model='jugde' is none of data\.rewards\.models \(judge\)",
        ),
        ({"function": takes_models, "isolation": "process"}, "Set isolation to 'thread'"),
        ({"length": 10**6}, r"models\.judge\.max_model_len=1000000: bundled/tiny-random has \d+ positions"),
        ({"length": 1}, r"max_model_len=1: must be at least 2"),
        ({"model_name": "bundled/nothing"}, r"data\.rewards\.models\.judge: .*no bundled model"),
        ({"name": "my judge"}, r"data\.rewards\.models: 'my judge' must be a name of letters"),
        ({"kind": "oracle"}, r"models\.judge\.kind='oracle': must be"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    model = RewardModelSettings(
        model_name=changes.pop("model_name", JUDGE),
        kind=changes.pop("kind", "generative"),
        max_model_len=changes.pop("length", 64),
        serving=serving(),
    )
    options = {"function": takes_models, "models": {changes.pop("name", "judge"): model}} | changes
    with pytest.raises(ValueError, match=message):
        RewardLoopManager(Runtime("inline"), RewardSettings(**options))


def test_a_classifier_on_vllm_has_a_replica_of_its_own() -> None:
    assert (
        RewardModelSettings(model_name="a/b", kind="classifier")
        .resolved_serving()
        .replica.endswith("vllm_classifier_replica.VLLMClassifierReplica")
    )
    assert RewardModelSettings(model_name="a/b").resolved_serving().replica == "vllm"
