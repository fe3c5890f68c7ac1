import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_rl.data import PromptFiles, PromptRowError, PromptSource
from lit_rl.data.prompt_rows import prompt_from_row


def row(index: int | None = 0, **columns: Any) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"Question {index}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"index": index, "split": "train"},
        **columns,
    }


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(one) for one in rows))
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_the_three_formats_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [row(0, agent_name=None), row(1, agent_name="tool_agent")]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    sources = [
        PromptFiles([tmp_path / "a.json"]),
        PromptFiles(str(write_jsonl(tmp_path / "a.jsonl", rows))),
        PromptFiles([str(write_parquet(tmp_path / "a.parquet", rows))]),
    ]
    for source in sources:
        assert isinstance(source, PromptSource)
        assert [source[i] for i in range(len(source))] == [sources[0][0], sources[0][1]]
    prompt = sources[0][1]
    assert prompt.row_id == "sums/train/1"
    assert prompt.messages == [{"role": "user", "content": "Question 1"}]
    assert (prompt.ground_truth, prompt.ability, prompt.agent_name) == ("1", "math", "tool_agent")


def test_keys_that_parquet_adds_to_other_rows_are_dropped(tmp_path: Path) -> None:
    rows = [
        row(0, extra_info={"index": 0, "tools_kwargs": {"search": {"create_kwargs": {"k": 3}}}}),
        row(1, extra_info={"index": 1, "tools_kwargs": {"calculator": {"create_kwargs": {"precision": 2}}}}),
    ]
    source = PromptFiles([write_parquet(tmp_path / "a.parquet", rows)])
    assert source[0].extra_info == rows[0]["extra_info"]
    assert source[1].extra_info == rows[1]["extra_info"]


def test_arrays_become_lists_at_any_depth() -> None:
    messages = np.array([{"role": "user", "content": "Q"}], dtype=object)
    targets = {"target": np.array(["a", "b"], dtype=object)}
    prompt = prompt_from_row(
        row(np.int64(3), prompt=messages, reward_model={"style": "rule", "ground_truth": targets}), "here"
    )
    assert prompt.messages == [{"role": "user", "content": "Q"}]
    assert prompt.ground_truth == {"target": ["a", "b"]}
    assert prompt.row_id == "sums/train/3"
    assert type(prompt.extra_info["index"]) is int


# O48: one row without the gold answer, and a file without its column.
def test_a_missing_ground_truth_names_file_row_and_columns(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "gold.jsonl", [row(0), row(1, reward_model={"style": "rule"})])
    with pytest.raises(PromptRowError) as caught:
        PromptFiles([file])
    message = str(caught.value)
    assert "gold.jsonl, row 1: column 'reward_model' has no ground_truth" in message
    assert "Columns present: ability, data_source, extra_info, prompt, reward_model." in message


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_missing_column_names_file_row_and_columns(tmp_path: Path, suffix: str) -> None:
    rows = [{key: value for key, value in row(0).items() if key != "reward_model"}]
    file = tmp_path / f"gold.{suffix}"
    (write_jsonl if suffix == "jsonl" else write_parquet)(file, rows)
    with pytest.raises(PromptRowError) as caught:
        PromptFiles([file])
    message = str(caught.value)
    assert f"gold.{suffix}, row 0: column 'reward_model' is missing" in message
    assert "Columns present: ability, data_source, extra_info, prompt." in message


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": "What?"}, "column 'prompt' must be a list of {role, content} messages, not str"),
        ({"prompt": []}, "column 'prompt' must be a list"),
        ({"prompt": [{"content": "Q"}]}, "message 0 without a role"),
        ({"prompt": [{"role": "user"}]}, r"message 0 \(role 'user'\) without content"),
        ({"data_source": ""}, "column 'data_source' must be a text"),
        ({"extra_info": "x"}, "column 'extra_info' must be a mapping"),
        ({"extra_info": {"tools_kwargs": {"search": 3}}}, "tools_kwargs that do not map"),
        ({"extra_info": {"tools_kwargs": [1]}}, "tools_kwargs that do not map"),
        ({"agent_name": 3}, "column 'agent_name' must be the name of an agent loop"),
        ({"images": ["a.png"]}, "column 'images' holds media"),
        ({"reward_model": {"style": "rule", "ground_truth": ""}}, "has no ground_truth"),
    ],
)
def test_malformed_columns_are_named(columns: dict, message: str) -> None:
    with pytest.raises(PromptRowError, match=message):
        prompt_from_row(row(0, **columns), "a.jsonl, row 0")


def test_a_reward_model_needs_no_ground_truth() -> None:
    assert prompt_from_row(row(0, reward_model={"style": "model"}), "here").ground_truth is None


def test_zero_is_a_ground_truth_and_an_index() -> None:
    prompt = prompt_from_row(row(0, reward_model={"style": "rule", "ground_truth": 0}), "here")
    assert prompt.ground_truth == 0
    assert prompt.row_id == "sums/train/0"


def test_rows_without_index_have_ids_of_their_content() -> None:
    first, same, other = (
        prompt_from_row(row(None, prompt=[{"content": text, "role": "user"}]), "here") for text in ("a", "a", "b")
    )
    assert first.row_id == same.row_id != other.row_id


def test_double_row_ids_name_both_rows(tmp_path: Path) -> None:
    first, second = (write_jsonl(tmp_path / f"{name}.jsonl", [row(0)]) for name in "ab")
    with pytest.raises(PromptRowError, match=r"b\.jsonl, row 0: row id 'sums/train/0' is taken by .*a\.jsonl, row 0"):
        PromptFiles([first, second])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "holds no rows"),
        ("a.json", "[]", "holds no rows"),
        ("a.json", "{}", "must hold one list of rows"),
        ("a.json", '{"a": 1}\n{"a": 2}', r"one row a line needs the suffix \.jsonl"),
        ("a.jsonl", "\n{oops}", "line 2: is no valid JSON"),
        ("a.jsonl", "[1]", "row 0: must be an object with columns, not list"),
        ("a.parquet", "oops", "is no readable Parquet file"),
        ("a.csv", "x", r"prompt files end in \.parquet"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"(?i){name}.*{message}"):
        PromptFiles([tmp_path / name])


def test_an_empty_parquet_file_shows_its_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="holds no rows. Columns present: prompt"):
        PromptFiles([tmp_path / "a.parquet"])


def test_a_missing_file_and_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        PromptFiles([tmp_path / "nowhere.jsonl"])
    with pytest.raises(ValueError, match="files is empty"):
        PromptFiles([])


def test_max_samples_takes_the_first_rows_or_a_seeded_subset(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", [row(index) for index in range(20)])

    def indices(**settings: int) -> list[int]:
        source = PromptFiles([file], **settings)
        return [source[i].extra_info["index"] for i in range(len(source))]

    assert indices(max_samples=3) == [0, 1, 2]
    assert indices(max_samples=99) == list(range(20))
    assert indices(max_samples=5, sample_seed=1) == indices(max_samples=5, sample_seed=1) != [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="max_samples=0"):
        indices(max_samples=0)
