"""Public NQ/HotpotQA files become prompt files with verl's columns; files of that format are written here."""

import logging

import pyarrow
import pyarrow.parquet
import pytest
from prepare_search_r1 import INSTRUCTION, prepare, prepare_row

from lit_rl.data import PromptFiles
from lit_rl.rewards.score import compute_score


def public_row(number, **changes):
    row = {
        "id": f"train_{number}",
        "question": f"who wrote book {number}?",
        "golden_answers": [f"Author {number}", "Someone"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "the instruction of another system"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": [f"Author {number}", "Someone"]}, "style": "rule"},
        "extra_info": {"index": number, "split": "train"},
        "metadata": None,
    }
    return {**row, **changes}


def write(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "public"
    folder.mkdir()
    write(folder / "train.parquet", [public_row(number) for number in range(5)])
    write(folder / "test.parquet", [public_row(0), public_row(1, data_source="hotpotqa")])
    return folder


def test_rows_have_verls_columns(source, tmp_path):
    written = prepare(str(source), tmp_path / "out")
    assert [path.name for path in written] == ["train.parquet", "test.parquet"]
    row = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()[3]
    target = {"target": ["Author 3", "Someone"]}
    assert row == {
        "data_source": "searchR1_nq",
        "prompt": [
            {"role": "system", "content": "You are a helpful and harmless assistant."},
            {"role": "user", "content": INSTRUCTION + "who wrote book 3?"},
        ],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": target, "style": "rule"},
        "extra_info": {
            "index": 3,
            "need_tools_kwargs": True,
            "question": "who wrote book 3?",
            "split": "train",
            "tools_kwargs": {
                "search": {
                    "create_kwargs": {
                        "ground_truth": target, "question": "who wrote book 3?", "data_source": "searchR1_nq"
                    }
                }
            },
        },
        "metadata": None,
    }  # fmt: skip
    # The instruction's example is in the prompt; a response that repeats nothing of it has no answer (O34).
    assert "<answer> Beijing </answer>" in row["prompt"][1]["content"]


def test_written_rows_are_prompts_that_the_scorer_scores(source, tmp_path):
    prepare(str(source), tmp_path / "out")
    prompts = PromptFiles([tmp_path / "out" / "test.parquet"])
    assert [prompts[index].data_source for index in range(2)] == ["searchR1_nq", "searchR1_hotpotqa"]
    score = lambda text: compute_score(prompts[1].data_source, text, prompts[1].ground_truth)  # noqa: E731
    assert score("<think>Beijing?</think><answer> author 1.</answer>") == 1.0
    assert score("<answer>Beijing</answer>") == 0.0


def test_gold_answers_stand_in_for_a_missing_ground_truth():
    row = prepare_row(public_row(0, reward_model=None, golden_answers="Ann"), 7, "test")
    assert row["reward_model"] == {"ground_truth": {"target": ["Ann"]}, "style": "rule"}
    assert row["extra_info"]["tools_kwargs"]["search"]["create_kwargs"]["ground_truth"] == {"target": ["Ann"]}
    assert prepare_row(public_row(0, data_source="searchR1_nq"), 0, "test")["data_source"] == "searchR1_nq"


def test_a_missing_split_is_skipped_and_a_broken_one_reported(source, tmp_path, caplog):
    (source / "test.parquet").unlink()
    write(source / "train.parquet", [public_row(0), public_row(1, question=None)])
    with caplog.at_level(logging.WARNING):
        assert prepare(str(source), tmp_path / "out") == []
    text = caplog.text
    assert "row 1: column 'question' is missing or empty" in text
    assert "no split test: skipped" in text
    assert "Nothing was written" in text
    assert list((tmp_path / "out").iterdir()) == []


def test_a_row_without_answers_is_refused():
    with pytest.raises(ValueError, match="row 4: neither"):
        prepare_row(public_row(0, reward_model=None, golden_answers=[]), 4, "train")


def test_files_are_copied_to_an_address(source, tmp_path):
    prepare(str(source), tmp_path / "out", f"file://{tmp_path}/far/away")
    for name in ("train.parquet", "test.parquet"):
        assert (tmp_path / "far/away" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
