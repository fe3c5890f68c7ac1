"""A simulated user: what answers the policy's messages that call no tool, until it is satisfied.

Position in the flow: ToolAgentLoop -> **UserSession** -> an interaction of the user's own. One interaction object
serves all trajectories of a worker, so state belongs in a dict keyed by instance id. A row asks for one with
``extra_info.interaction_kwargs.name``; rows without it have no user.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from lit_rl.data.user_files import load_user_file
from lit_rl.tools.session import bounded
from lit_rl.types import Message, Prompt

logger = logging.getLogger(__name__)


class BaseInteraction:
    """A simulated user. Subclasses override `generate_response` and what else they need.

    Args:
        config: The entry's ``config`` of the interaction YAML; ``name`` is in it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", type(self).__name__)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Set up the state of one trajectory and return its id.

        Args:
            instance_id: Identity to use; ``None`` draws one.
            **kwargs: The row's ``interaction_kwargs`` without ``name``.
        """
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the conversation.

        Args:
            instance_id: What `start_interaction` returned.
            messages: The whole conversation, the policy's message last; read only.
            **kwargs: As in `start_interaction`.

        Returns:
            Whether the conversation ends here (then the text is not shown), the user's message, a score of the policy's
            last turn, and numbers for the log.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_response().")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the whole conversation, asked for once at its end."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Drop the state of one trajectory; called exactly once, also after an error."""


class UserSession:
    """The simulated user of one trajectory; use as ``async with``.

    Args:
        interaction: Who answers.
        prompt: The row.
        timeout_s: Longest answer, seconds of wall clock.

    Attributes:
        turn_scores: Score of each turn that was answered.
        metrics: Sums of the numbers that the interaction reported.
    """

    def __init__(self, interaction: BaseInteraction, prompt: Prompt, timeout_s: float) -> None:
        self.interaction = interaction
        self.turn_scores: list[float] = []
        self.metrics: dict[str, float] = {}
        self._row_id = prompt.row_id
        self._timeout_s = timeout_s
        self._kwargs = {k: v for k, v in prompt.extra_info["interaction_kwargs"].items() if k != "name"}
        self._instance_id = f"{prompt.row_id}-{id(self):x}"

    async def __aenter__(self) -> UserSession:
        try:
            self._instance_id = await self._call("start_interaction", self._instance_id) or self._instance_id
        except BaseException:
            await self._finalize()  # what started half-way holds something too
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._finalize()

    async def reply(self, messages: list[Message]) -> str | None:
        """Return the user's next message, ``None`` where the user ends the conversation.

        Raises:
            RuntimeError: If the interaction fails or runs too long; names row and interaction.
        """
        should_stop, text, score, numbers = await self._call(
            "generate_response", self._instance_id, [dict(message) for message in messages]
        )
        self.turn_scores.append(float(score))
        for key, value in (numbers or {}).items():
            if isinstance(value, int | float):
                name = f"interaction/{self.interaction.name}/{key}"
                self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
        return None if should_stop else str(text)

    async def final_score(self) -> float:
        """Return the score of the whole conversation."""
        return float(await self._call("calculate_score", self._instance_id))

    async def _finalize(self) -> None:
        try:
            await self._call("finalize_interaction", self._instance_id)
        except RuntimeError as error:  # the conversation is over, and may have an error of its own
            logger.warning("%s", error)

    async def _call(self, method: str, *args: Any) -> Any:
        outcome = await bounded(getattr(self.interaction, method)(*args, **self._kwargs), self._timeout_s)
        if isinstance(outcome, BaseException):
            raise RuntimeError(
                f"Row {self._row_id}: {method} of interaction '{self.interaction.name}' failed: {outcome!r}"
            ) from outcome
        return outcome


def find_interaction(interactions: Mapping[str, BaseInteraction], prompt: Prompt) -> BaseInteraction | None:
    """Return the interaction that a row asks for; ``None`` where it asks for none.

    Raises:
        ValueError: If the row names none, or one that is not configured.
    """
    kwargs = prompt.extra_info.get("interaction_kwargs")
    if not kwargs:
        return None
    place = f"Row {prompt.row_id}: extra_info.interaction_kwargs"
    if not isinstance(kwargs, Mapping) or not kwargs.get("name"):
        raise ValueError(f"{place} must be a mapping with 'name', got {kwargs!r}.")
    if kwargs["name"] not in interactions:
        raise ValueError(
            f"{place}.name={kwargs['name']!r} is not configured in data.agents.interaction_config_path; "
            f"there are {sorted(interactions)}."
        )
    return interactions[kwargs["name"]]


def load_interactions(path: str) -> dict[str, BaseInteraction]:
    """Return new interaction objects of a YAML by name.

    The file has a key ``interaction`` with a list of ``{name, class_name, config}``; ``class_name`` is a dotted path,
    or ``file.py:ClassName`` with the file relative to the YAML; ``name`` defaults to the class's name.

    Raises:
        FileNotFoundError: If the file is missing.
        ValueError: For anything wrong inside it, naming the entry.
    """
    import yaml

    if not Path(path).is_file():
        raise FileNotFoundError(f"Interaction YAML not found: {path}")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no valid YAML: {error}") from error
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{path} must have a top-level key 'interaction' with a list of entries.")
    interactions: dict[str, BaseInteraction] = {}
    for index, entry in enumerate(entries):
        interaction = _build(f"{path}: interaction[{index}]", entry, Path(path).resolve().parent)
        if interaction.name in interactions:
            raise ValueError(f"{path}: two interactions are called {interaction.name!r}.")
        interactions[interaction.name] = interaction
    return interactions


def _build(place: str, entry: Any, folder: Path) -> BaseInteraction:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
        raise ValueError(f"{place} must be a mapping with 'class_name' (a dotted path) and optionally name and config.")
    if not isinstance(entry.get("name") or "", str) or not isinstance(entry.get("config") or {}, dict):
        raise ValueError(f"{place}: name must be a text and config a mapping.")
    file, separator, name = entry["class_name"].rpartition(".py:")
    try:
        if separator:
            found = getattr(load_user_file((folder / f"{file}.py").resolve()), name)
        else:
            module, _, name = entry["class_name"].rpartition(".")
            found = getattr(importlib.import_module(module), name)
        if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
            raise TypeError(f"{entry['class_name']} is no subclass of lit_rl.agents.interactions.BaseInteraction")
        return found({"name": entry.get("name") or found.__name__, **(entry.get("config") or {})})
    except Exception as error:  # importing and building run user code
        raise ValueError(f"{place} ({entry['class_name']}): {type(error).__name__}: {error}") from error
