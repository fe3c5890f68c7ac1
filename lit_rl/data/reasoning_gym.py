"""Prompts of any procedural task of the package ``reasoning-gym``.

Position in the flow: **generated task** -> prompt cursor -> agent loops; the scorer finds task and entry in
``extra_info``. The package is imported when an object is built (about 5 s), not with this module. Scoring is not done
here.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from lit_rl.data.prompt_rows import as_plain
from lit_rl.types import Prompt

# Of 100 buckets: 80 train, 10 val, 10 test.
_BUCKETS = {"train": range(0, 80), "val": range(80, 90), "test": range(90, 100)}
# Generated entries per row asked for. A tenth of them belongs to val.
_MAX_ENTRIES_PER_ROW = 100


class ReasoningGym:
    """Questions of one task; ``extra_info`` holds the ``task`` and the ``entry`` that its scorer needs.

    Questions are split by a hash of their text, so train, val and test share none, whatever the seed.

    Args:
        task: Name of the task, such as ``chain_sum``, ``gsm_symbolic`` or ``countdown``.
        num_rows: Rows to generate.
        split: ``train`` (80 % of all questions), ``val`` or ``test`` (10 % each).
        seed: Of the generator.
        task_config: Settings of the task, such as ``{"min_terms": 2}``.
        system_prompt: Text of a system message before the question.

    Raises:
        ModuleNotFoundError: If ``reasoning-gym`` is not installed.
        ValueError: If the task, a setting or the split is unknown, or the task has too few different questions.
    """

    def __init__(
        self,
        task: str,
        num_rows: int = 500,
        split: Literal["train", "val", "test"] = "train",
        seed: int = 0,
        task_config: dict[str, Any] | None = None,
        system_prompt: str | None = None,
    ) -> None:
        if split not in _BUCKETS:
            raise ValueError(f"ReasoningGym: split={split!r} must be train, val or test.")
        if num_rows < 1:
            raise ValueError(f"ReasoningGym: num_rows={num_rows} must be at least 1.")
        self.task = task
        self.split = split
        self.system_prompt = system_prompt
        max_entries = num_rows * _MAX_ENTRIES_PER_ROW
        dataset = _create_dataset(task, {**(task_config or {}), "seed": seed, "size": max_entries})
        entries: dict[str, dict[str, Any]] = {}
        for index in range(max_entries):
            entry = dataset[index]
            if _bucket(entry["question"]) in _BUCKETS[split]:
                entries.setdefault(entry["question"], as_plain(entry))
                if len(entries) == num_rows:
                    break
        else:
            raise ValueError(
                f"ReasoningGym: num_rows={num_rows}, but {max_entries} entries of task {task!r} gave only "
                f"{len(entries)} different questions of split {split}. "
                "Lower num_rows, or make the task larger with task_config."
            )
        self._entries = list(entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Prompt:
        entry = self._entries[index]
        messages = [{"role": "user", "content": entry["question"]}]
        if self.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        digest = hashlib.blake2b(entry["question"].encode(), digest_size=8).hexdigest()
        return Prompt(
            row_id=f"reasoning_gym/{self.task}/{digest}",
            messages=messages,
            data_source=f"reasoning_gym/{self.task}",
            ground_truth=entry["answer"],
            ability="reasoning",
            extra_info={"index": index, "split": self.split, "task": self.task, "entry": entry},
        )


def _create_dataset(task: str, settings: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"ReasoningGym: task {task!r} needs the package reasoning-gym. Fix: pip install reasoning-gym."
        ) from error
    if task not in DATASETS:
        raise ValueError(f"ReasoningGym: there is no task {task!r}. Tasks: {', '.join(sorted(DATASETS))}.")
    try:
        return reasoning_gym.create_dataset(task, **settings)
    except (TypeError, AssertionError) as error:  # an unknown setting, or one out of the task's range
        raise ValueError(f"ReasoningGym: task {task!r} refuses these settings: {error}") from error


def _bucket(question: str) -> int:
    return int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest(), "big") % 100
