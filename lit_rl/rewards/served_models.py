"""Reward models that lit_rl serves itself: started before the reward workers, stopped with them.

Position in the flow: settings -> **RewardModelServers** (trainer process: engines) -> `ServedRewardModel` (in every
reward worker) -> reward functions that take ``models``. A judge writes text, a classifier returns numbers; both are
replicas behind the same balancer and client as the policy's.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from lit_rl.cluster import Runtime
from lit_rl.rewards.reward_model import load_tokenizer, render
from lit_rl.rewards.settings import RewardModelSettings
from lit_rl.serving import LLMServerClient, LLMServerManager
from lit_rl.serving.manager import EngineStartFailed
from lit_rl.types import Message, SamplingParams


class ServedRewardModel:
    """One reward model as reward functions see it. Picklable with Ray; each worker loads its tokenizer once.

    Args:
        name: Key of ``data.rewards.models``.
        kind: ``generative`` or ``classifier``.
        path: Folder or hub id of its tokenizer.
        client: Sends requests to its replicas.
    """

    def __init__(self, name: str, kind: str, path: str, client: LLMServerClient) -> None:
        self.name = name
        self.kind = kind
        self._path = path
        self._client = client
        self._template: Any = None

    async def generate(self, messages: list[Message], *, max_tokens: int = 512, temperature: float = 0.0) -> str:
        """Return the model's answer to a conversation, greedy by default.

        Args:
            messages: The conversation.
            max_tokens: Longest answer, tokens.
            temperature: Of the sampling; 0 is greedy.

        Raises:
            TypeError: If the model is a classifier.
            ValueError: If the conversation is too long for the model.
            ConnectionError: If no replica answers.
        """
        self._require("generative", "generate")
        template = self._load_template()
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        output = await self._client.generate(template.render_prompt(messages), sampling, uuid.uuid4().hex)
        return str(template.tokenizer.decode(output.token_ids, skip_special_tokens=True))

    async def classify(self, messages: list[Message]) -> list[float]:
        """Return the classifier's outputs for a conversation, one per label, before any activation.

        Args:
            messages: The conversation, the answer to be judged included.

        Raises:
            TypeError: If the model is generative.
            ValueError: If the conversation is too long for the model.
            ConnectionError: If no replica answers.
        """
        self._require("classifier", "classify")
        # As a server behind an address would encode the text, so that both give the same score.
        token_ids = load_tokenizer(self._path)(render(self._path, messages)).input_ids
        return await self._client.classify(list(token_ids))

    def _require(self, kind: str, method: str) -> None:
        if self.kind != kind:
            raise TypeError(f"data.rewards.models.{self.name} is of kind {self.kind!r}: {method}() needs kind: {kind}.")

    def _load_template(self) -> Any:
        if self._template is None:
            from lit_rl.data.chat_template import ChatTemplate

            self._template = ChatTemplate(load_tokenizer(self._path))
        return self._template


class RewardModelServers:
    """The replicas of all configured reward models.

    Args:
        runtime: Where they run.
        settings: By name.
        gpu: Whether replicas take GPUs.
        verbose: Show the engines' own logs.

    Raises:
        ValueError: If a model's name is no model, or its length is beyond the model.
    """

    def __init__(
        self, runtime: Runtime, settings: dict[str, RewardModelSettings], *, gpu: bool, verbose: bool = False
    ) -> None:
        self._settings = settings
        self._paths: dict[str, str] = {}
        self._managers: dict[str, LLMServerManager] = {}
        suffix = uuid.uuid4().hex[:8]  # two managers may live in one runtime
        for name, model in settings.items():
            self._paths[name], length = _path_and_length(name, model)
            self._managers[name] = LLMServerManager(
                runtime,
                model.resolved_serving(),
                self._paths[name],
                length,
                gpu=gpu,
                verbose=verbose,
                prefix=f"reward_model_{name}_{suffix}_",
            )

    async def start(self) -> dict[str, ServedRewardModel]:
        """Start the replicas and return what reward functions get.

        Raises:
            EngineStartFailed: With the name of the model, after everything started so far is gone.
        """
        models = {}
        for name, manager in self._managers.items():  # one after another: together they would need more memory
            try:
                await manager.start()
            except EngineStartFailed as error:
                await self.stop()
                raise EngineStartFailed(f"data.rewards.models.{name}: {error}") from error
            models[name] = ServedRewardModel(name, self._settings[name].kind, self._paths[name], manager.client())
        return models

    async def stop(self) -> None:
        """Stop all replicas. Idempotent."""
        for manager in self._managers.values():
            await manager.stop()


def check_models_are_used(settings: dict[str, RewardModelSettings], asked: list[tuple[str, dict[str, Any]]]) -> None:
    """Refuse reward models that no function takes, and functions that name one which is not there.

    Args:
        settings: By name.
        asked: Name and keyword arguments of each reward function that takes ``models``.

    Raises:
        ValueError: In either case.
    """
    if settings and not asked:
        raise ValueError(
            f"data.rewards.models: no reward function takes the keyword `models`, so {', '.join(settings)} would be "
            "started for nothing. Use lit_rl.rewards.judge:compute_score, lit_rl.rewards.reward_model:compute_score, "
            "or a function of your own with that parameter."
        )
    for function, kwargs in asked:
        model = kwargs.get("model")
        if model is not None and kwargs.get("base_url") is None and model not in settings:
            raise ValueError(
                f"Reward function {function}: model={model!r} is none of data.rewards.models "
                f"({', '.join(settings) or 'which is empty'}). Add it there, or give the base_url of its server."
            )


def _path_and_length(name: str, model: RewardModelSettings) -> tuple[str, int]:
    from lit_rl.models.loading import max_positions, resolve_model

    path = _with_option(name, resolve_model, model.model_name)
    limit = _with_option(name, max_positions, path)
    wanted = model.max_model_len
    if limit is not None and wanted > limit:
        raise ValueError(
            f"data.rewards.models.{name}.max_model_len={wanted}: {model.model_name} has {limit} positions. Lower it."
        )
    return path, wanted


def _with_option(name: str, function: Callable[[str], Any], model: str) -> Any:
    try:
        return function(model)
    except (ValueError, OSError) as error:
        raise ValueError(f"data.rewards.models.{name}: {error}") from error
