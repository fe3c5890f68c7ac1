"""The data of supervised fine-tuning: demonstrations in optimizer steps, measured with or without an engine.

`SFTDataModule` starts nothing: rows in, packed batches out, validation by loss and token accuracy on held-out
conversations. `WarmupDataModule` trains on the same batches and validates by rollouts, so that a warm-up before RL can
stop on what RL will need, such as the rate of answers in the right format. It stands beside `lit_rl.datamodule` and not
in `lit_rl.data`, since it plans steps with `lit_rl.experience`.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_rl.agents.run_tools import tool_schemas
from lit_rl.data import ChatTemplate, ConversationSource, ConversationTokens, PromptCursor, PromptSource
from lit_rl.data.conversation_tokens import tokenize_source
from lit_rl.datamodule import RolloutDataModule
from lit_rl.experience.conversations import ConversationBatch, ConversationLoader
from lit_rl.experience.data_module import RunDataModule
from lit_rl.experience.option_checks import check_at_least
from lit_rl.models.loading import load_tokenizer, max_positions, resolve_model


class SFTDataModule(RunDataModule):
    """Serves demonstrations as packed mini-batches."""

    batch_class = ConversationBatch

    def __init__(
        self,
        model_name: str,
        train_data: ConversationSource,
        val_data: ConversationSource | None = None,
        batch_size: int = 8,
        steps_per_iteration: int | None = None,
        max_tokens_per_micro_batch: int = 4096,
        max_conversation_tokens: int = 2048,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        verbose: bool = False,
    ) -> None:
        """Keep the options and check what can be checked.

        Args:
            model_name: The policy's name, for its tokenizer.
            train_data: Conversations to learn from.
            val_data: Conversations of ``validate`` and of validation during ``fit``.
            batch_size: Most conversations of an optimizer step; steps of one iteration differ by at most one.
            steps_per_iteration: Optimizer steps between two checkpoints or validations; ``null`` makes an iteration one
                pass over the conversations.
            max_tokens_per_micro_batch: Most tokens of one forward and backward pass.
            max_conversation_tokens: Longer conversations are left out and counted.
            chat_template: Jinja text, or the path of a ``.jinja`` file, instead of the tokenizer's own template. Give
                the one that the policy will be rolled out with (``data.agents.chat_template``).
            chat_template_kwargs: Further variables of the template.
            shuffle: Use conversations in a random order, a new one each pass.
            seed: Of that order.
            verbose: Show the logs of libraries.
        """
        super().__init__()
        self.model_name = model_name
        self.sources = {"train": train_data, "val": val_data}
        self.batch_size = batch_size
        self.steps_per_iteration = steps_per_iteration
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.max_conversation_tokens = max_conversation_tokens
        self.chat_template = chat_template
        self.chat_template_kwargs = chat_template_kwargs
        self.shuffle = shuffle
        self.seed = seed
        self.verbose = verbose
        _check_steps(self)
        self._rows: dict[str, list[ConversationTokens]] = {}

    def setup(self, stage: str) -> None:
        """Read, render and measure the conversations."""
        _check_one_device(self.trainer)
        wanted = {"fit": ("train", "val"), "validate": ("val",)}.get(stage, ())
        if stage != "fit" and not any(self.sources[name] is not None for name in wanted):
            raise ValueError(
                f"{stage} has no rows: set data.val_data, and use fit or validate. Rollouts need "
                "lit_rl.RolloutDataModule."
            )
        path = resolve_model(self.model_name)
        _check_model_length(self, path)
        template = ChatTemplate(
            load_tokenizer(path), template_kwargs=self.chat_template_kwargs, custom_template=self.chat_template
        )
        for name in wanted:
            source = self.sources[name]
            if source is not None and name not in self._rows:
                self._rows[name] = tokenize_source(
                    source, template, self.max_conversation_tokens, option=f"data.{name}_data"
                )
        if stage == "fit" and self._cursor is None:
            self._cursor = PromptCursor.for_source(self._rows["train"], seed=self.seed, shuffle=self.shuffle)  # type: ignore[arg-type]

    def train_dataloader(self) -> ConversationLoader:
        """One pass over it is one iteration."""
        return _training_loader(self, self._rows["train"])

    def val_dataloader(self) -> ConversationLoader | list[Any]:
        """All validation conversations, in their order."""
        rows = self._rows.get("val")
        if not rows:
            return []
        return ConversationLoader(
            rows,
            None,
            batch_size=max(self.batch_size, 64),
            num_steps=None,
            max_tokens=self.max_tokens_per_micro_batch,
            phase=self.phase,
        )


class WarmupDataModule(RolloutDataModule):
    """Serves demonstrations for training and rolls out for validation."""

    batch_class = ConversationBatch

    def __init__(
        self,
        model_name: str,
        train_data: ConversationSource,
        val_data: PromptSource,
        batch_size: int = 8,
        steps_per_iteration: int | None = None,
        max_conversation_tokens: int = 2048,
        max_tokens_per_micro_batch: int = 4096,
        **kwargs: Any,
    ) -> None:
        """Keep the options and check what can be checked.

        Args:
            model_name: The policy's name, for tokenizer and replicas.
            train_data: Conversations to learn from.
            val_data: Prompts that the policy is rolled out on, with tools and rewards as in RL.
            batch_size: Most conversations of an optimizer step; steps of one iteration differ by at most one.
            steps_per_iteration: Optimizer steps between two checkpoints or validations; ``null`` makes an iteration one
                pass over the conversations.
            max_conversation_tokens: Longer conversations are left out and counted.
            max_tokens_per_micro_batch: Most tokens of one forward and backward pass.
            kwargs: Options of RolloutDataModule; those of training rollouts have no effect.
        """
        super().__init__(model_name, [], val_data, max_tokens_per_micro_batch=max_tokens_per_micro_batch, **kwargs)
        self.sources["train"] = None
        self.conversations = train_data
        self.batch_size = batch_size
        self.steps_per_iteration = steps_per_iteration
        self.max_conversation_tokens = max_conversation_tokens
        _check_steps(self)
        self._training_rows: list[ConversationTokens] = []

    def train_dataloader(self) -> ConversationLoader:  # type: ignore[override]
        """One pass over it is one iteration."""
        return _training_loader(self, self._training_rows)

    def _load_rows(self, stage: str) -> None:
        """Render the conversations as the agent loops render prompts, the run's tools included."""
        super()._load_rows("validate" if stage == "fit" else stage)
        if stage != "fit" or self._cursor is not None:
            return
        _check_model_length(self, resolve_model(self.model_name))
        template = ChatTemplate(
            self._tokenizer,
            template_kwargs=self.agents.chat_template_kwargs,
            custom_template=self.agents.chat_template,
        )
        self._training_rows = tokenize_source(
            self.conversations,
            template,
            self.max_conversation_tokens,
            option="data.train_data",
            tools=tool_schemas(self._tools or {}),
        )
        self._cursor = PromptCursor.for_source(self._training_rows, seed=self.seed, shuffle=self.shuffle)  # type: ignore[arg-type]


def _training_loader(data: Any, rows: list[ConversationTokens]) -> ConversationLoader:
    return ConversationLoader(
        rows,
        data._cursor,
        batch_size=data.batch_size,
        num_steps=data.steps_per_iteration,
        max_tokens=data.max_tokens_per_micro_batch,
        phase=data.phase,
    )


def _check_steps(data: Any) -> None:
    check_at_least(1, batch_size=data.batch_size, steps_per_iteration=data.steps_per_iteration)
    check_at_least(1, max_tokens_per_micro_batch=data.max_tokens_per_micro_batch)
    check_at_least(1, max_conversation_tokens=data.max_conversation_tokens)
    if data.max_conversation_tokens > data.max_tokens_per_micro_batch:
        raise ValueError(
            f"data.max_conversation_tokens={data.max_conversation_tokens} is above data.max_tokens_per_micro_batch="
            f"{data.max_tokens_per_micro_batch}: a conversation must fit into a forward pass. Raise the latter."
        )


def _check_model_length(data: Any, path: str) -> None:
    limit = max_positions(path)
    if limit is not None and data.max_conversation_tokens > limit:
        raise ValueError(
            f"data.max_conversation_tokens={data.max_conversation_tokens} is more than the {limit} positions of "
            f"{data.model_name}. Lower it."
        )


def _check_one_device(trainer: Any) -> None:
    if trainer is not None and (trainer.world_size > 1 or not isinstance(trainer.strategy, SingleDeviceStrategy)):
        raise ValueError(
            f"trainer.strategy={type(trainer.strategy).__name__} with {trainer.world_size} training processes: this "
            "version trains on one device. Set trainer.devices=1 and leave trainer.strategy at auto."
        )
