import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_rl.data import HuggingFaceDataset, PromptRowError, ReasoningGym

ROW = {
    "prompt": [{"role": "user", "content": "Q"}],
    "data_source": "s",
    "reward_model": {"ground_truth": "1"},
}
ROWS = [{"q": f"Question {i}", "a": str(i)} for i in range(5)]


def test_question_and_answer_columns_become_prompts() -> None:
    source = HuggingFaceDataset(
        ROWS, question_column="q", answer_column="a", data_source="quiz", system_prompt="S", max_samples=3
    )
    assert len(source) == 3
    assert source[2].messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "Question 2"}]
    assert (source[2].ground_truth, source[2].data_source, source[2].row_id) == ("2", "quiz", "quiz/train/2")


def test_rows_in_the_file_schema_are_taken_as_they_are() -> None:
    assert HuggingFaceDataset([ROW])[0].ground_truth == "1"
    with pytest.raises(PromptRowError, match=r"row 1: column 'data_source' is missing.*Columns present: prompt"):
        HuggingFaceDataset([ROW, {"prompt": ROW["prompt"]}])


def test_a_missing_dataset_column_names_row_and_columns() -> None:
    with pytest.raises(ValueError, match=r"row 0: column 'answer' is missing. Columns present: \['a', 'q'\]"):
        HuggingFaceDataset(ROWS, question_column="q", answer_column="answer")
    with pytest.raises(ValueError, match="go together"):
        HuggingFaceDataset(ROWS, question_column="q")
    with pytest.raises(ValueError, match="holds no rows"):
        HuggingFaceDataset([])


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS, {"question_column": "q", "answer_column": "a", "max_samples": -1}, "max_samples=-1 must be at least 1"),
        (ROWS, {"system_prompt": "S"}, "system_prompt is used with question_column only"),
        (ROWS, {"data_source": "quiz"}, "data_source is used with question_column only"),
        ({"train": ROWS}, {}, r"dict \(train\), row 0: must be a mapping of columns, not str. Of a DatasetDict"),
        (
            [{**ROW, "extra_info": {"index": 3}}, {**ROW, "extra_info": {"index": 3}}],
            {},
            r"list \(train\), row 1.*list \(train\), row 0",
        ),
    ],
)
def test_what_cannot_be_read_is_told(rows: Any, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HuggingFaceDataset(rows, **options)


def test_a_folder_is_loaded_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    source = HuggingFaceDataset(str(folder), question_column="q", answer_column="a", data_source="quiz")
    assert [source[index].ground_truth for index in range(len(source))] == ["0", "1", "2", "3", "4"]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the package datasets is installed")
def test_a_name_without_the_package_says_what_to_install() -> None:
    with pytest.raises(ModuleNotFoundError, match="pip install datasets"):
        HuggingFaceDataset("gsm8k")


def test_reasoning_gym_rows_hold_what_their_scorer_needs() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    source = ReasoningGym("chain_sum", num_rows=20, seed=3, task_config={"max_terms": 3})
    prompt = source[7]
    score = reasoning_gym.get_score_answer_fn(prompt.extra_info["task"])
    assert score(answer=prompt.ground_truth, entry=prompt.extra_info["entry"]) == 1.0
    assert prompt.messages[0]["content"] == prompt.extra_info["entry"]["question"]
    assert prompt.data_source == "reasoning_gym/chain_sum"
    assert len({source[i].row_id for i in range(20)}) == 20
    again = ReasoningGym("chain_sum", num_rows=20, seed=3, task_config={"max_terms": 3})
    assert [again[i] for i in range(20)] == [source[i] for i in range(20)]


def test_reasoning_gym_splits_share_no_question() -> None:
    pytest.importorskip("reasoning_gym")
    small = {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2}
    ids = {
        split: {source[i].row_id for i in range(len(source))}
        for split in ("train", "val", "test")
        for source in [ReasoningGym("chain_sum", num_rows=12, split=split, task_config=small)]
    }
    assert not ids["train"] & ids["val"]
    assert not ids["train"] & ids["test"]
    assert not ids["val"] & ids["test"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "no_such_task"}, "there is no task 'no_such_task'. Tasks: .*chain_sum"),
        ({"task": "chain_sum", "task_config": {"typo": 1}}, "refuses these settings: .*typo"),
        ({"task": "chain_sum", "split": "dev"}, "split='dev'"),
        ({"task": "chain_sum", "num_rows": 0}, "num_rows=0"),
        (
            {"task": "coin_flip", "num_rows": 400, "task_config": {"min_trials": 3, "max_trials": 3}},
            "different questions",
        ),
    ],
)
def test_reasoning_gym_settings_are_checked(settings: dict, message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=message):
        ReasoningGym(**settings)


def test_the_package_needs_no_torch_and_no_heavy_import() -> None:
    heavy = ["torch", "transformers", "pyarrow", "reasoning_gym"]
    code = f"import sys, lit_rl.data; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
