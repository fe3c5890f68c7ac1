"""Prompts out of a Hugging Face dataset, by name or as an object.

Position in the flow: **dataset** -> prompt cursor -> agent loops. The package ``datasets`` is imported only when a
name is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_rl.data.prompt_dataset import choose_rows
from lit_rl.data.prompt_rows import check_row_ids, prompt_from_row
from lit_rl.types import Prompt


class HuggingFaceDataset:
    """Prompts of a dataset that has verl's columns, or of one with a question and an answer column.

    Args:
        dataset: Name or folder for ``datasets.load_dataset``, or a dataset object (anything that yields rows as
            mappings).
        split: Split to load.
        config_name: Configuration of the dataset, such as ``main`` for gsm8k.
        question_column: Column with the question, made into a user message. Default: the rows have verl's columns.
        answer_column: Column with the ground truth; needs ``question_column``.
        data_source: Chooses the scorer; needs ``question_column``. Default: the name of the dataset.
        system_prompt: Text of a system message before the question; needs ``question_column``.
        max_samples: Most rows to keep. Default: all.
        sample_seed: Seed of the random subset that ``max_samples`` keeps. Default: the first rows are kept.

    Raises:
        ModuleNotFoundError: If a name is given and ``datasets`` is not installed.
        ValueError: If a column is missing, a row does not follow the schema, or there are no rows.
    """

    def __init__(
        self,
        dataset: str | Any,
        split: str = "train",
        config_name: str | None = None,
        question_column: str | None = None,
        answer_column: str | None = None,
        data_source: str | None = None,
        system_prompt: str | None = None,
        max_samples: int | None = None,
        sample_seed: int | None = None,
    ) -> None:
        name = dataset if isinstance(dataset, str) else type(dataset).__name__
        if (question_column is None) != (answer_column is None):
            raise ValueError("HuggingFaceDataset: question_column and answer_column go together; give both or neither.")
        for option, value in (("data_source", data_source), ("system_prompt", system_prompt)):
            if value is not None and question_column is None:
                raise ValueError(
                    f"HuggingFaceDataset: {option} is used with question_column only; without it the rows have verl's "
                    "columns. Give question_column and answer_column, or leave it out."
                )
        rows = _load_by_name(dataset, split, config_name) if isinstance(dataset, str) else dataset
        placed: list[tuple[Prompt, str]] = []
        for index, row in enumerate(rows):
            place = f"{name} ({split}), row {index}"
            if not isinstance(row, Mapping):
                raise ValueError(
                    f"{place}: must be a mapping of columns, not {type(row).__name__}. Of a DatasetDict pass one split."
                )
            row = dict(row)
            columns = list(row)
            if question_column is not None and answer_column is not None:
                for column in (question_column, answer_column):
                    if row.get(column) is None:
                        raise ValueError(f"{place}: column {column!r} is missing. Columns present: {sorted(columns)}.")
                row = _question_row(row[question_column], row[answer_column], data_source or name, system_prompt)
                row["extra_info"] = {"index": index, "split": split}
            placed.append((prompt_from_row(row, place, columns=columns), place))
        if not placed:
            raise ValueError(f"{name} ({split}): holds no rows.")
        check_row_ids(placed)
        self._prompts = choose_rows([prompt for prompt, _ in placed], max_samples, sample_seed)

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def _load_by_name(name: str, split: str, config_name: str | None) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"HuggingFaceDataset: loading {name!r} by name needs the package datasets. Fix: pip install datasets, or "
            "pass a dataset object, or use lit_rl.data.PromptFiles."
        ) from error
    return datasets.load_dataset(name, config_name, split=split)


def _question_row(question: Any, answer: Any, data_source: str, system_prompt: str | None) -> dict[str, Any]:
    messages = [{"role": "user", "content": str(question)}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return {
        "prompt": messages,
        "data_source": data_source,
        "reward_model": {"style": "rule", "ground_truth": answer},
    }
