"""One conversation as text."""

from __future__ import annotations

import pytest
import yaml

from lit_rl.rollout_command import describe, find_row, printable, run_rollout
from lit_rl.types import Prompt, Trajectory

ROWS = [Prompt(row_id=f"sums/{i}", messages=[], data_source="sums", ground_truth="42") for i in range(3)]


def decode(token_ids: list[int]) -> str:
    return "".join(map(chr, token_ids))


def conversation(**changes: object) -> Trajectory:
    call = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    lost = {"type": "function", "id": "c2", "function": {"name": "add", "arguments": "{"}}
    fields: dict = {
        "row_id": "sums/1", "group_id": "g", "prompt_ids": [ord("Q")], "response_ids": list(map(ord, "callTOOLend")),
        "loss_mask": [1] * 4 + [0] * 4 + [1] * 3, "rollout_logprobs": [0.0] * 11, "policy_versions": [3] * 4 + [-1] * 4
        + [3, 4, 4], "reward": 0.5, "reward_parts": {"acc": 1.0}, "num_turns": 4, "metrics": {"generate_s": 0.123456},
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [call, lost]},
            {"role": "tool", "tool_call_id": "c1", "content": "TOOL"},
        ],
    }  # fmt: skip
    return Trajectory(**(fields | changes))


def test_every_speaker_has_a_block_and_calls_and_rewards_follow() -> None:
    assert describe(ROWS[1], conversation(), decode, uses_color=False).splitlines() == [
        "row sums/1  source sums  ground truth '42'",
        "-- prompt, 1 tokens",
        "Q",
        "-- policy, 4 tokens, weights of version 3",
        "call",
        "-- environment, 4 tokens, not trained on",
        "TOOL",
        "-- policy, 3 tokens, weights of version 3/4",
        "end",
        "-- tool calls",
        'add({"a": 1}) -> TOOL',
        'add("{") -> (not run)',
        "-- ended by stop after 4 turns",
        "reward 0.5  acc 1",
        "generate_s 0.123",
    ]


def test_colors_follow_the_mask_and_errors_are_shown() -> None:
    text = describe(ROWS[1], conversation(error="Row sums/1: it failed", reward=None), decode, uses_color=True)
    assert "\033[32mcall\033[0m" in text
    assert "\033[36mTOOL\033[0m" in text
    assert "\033[31mRow sums/1: it failed\033[0m" in text
    assert "reward None" in text


def test_a_policy_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\né") == "a\\x1b[2Jb\tc\né"


def test_rows_are_found_by_number_and_id() -> None:
    assert find_row(ROWS, "train", "2").row_id == "sums/2"
    assert find_row(ROWS, "train", "sums/1").row_id == "sums/1"
    with pytest.raises(
        SystemExit, match=r"--row 3: data\.train_data has the rows 0 to 2; the id of the first is 'sums/0'"
    ):
        find_row(ROWS, "train", "3")
    with pytest.raises(SystemExit, match=r"no data\.val_data"):
        find_row(None, "val", "0")


def test_a_configuration_is_needed() -> None:
    with pytest.raises(SystemExit, match="rollout needs a configuration"):
        run_rollout(["--row", "3"])


def test_data_without_rollouts_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"class_path": "lit_rl.data.AnsweredPrompts", "init_args": {"prompts": "lit_rl.data.Arithmetic"}}
    data = {"class_path": "lit_rl.SFTDataModule", "init_args": {"train_data": rows}}
    recipe = {"model_name": "bundled/tiny-random", "model": {"class_path": "lit_rl.SFT"}, "data": data}
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(recipe))

    with pytest.raises(SystemExit, match="rollout needs data that rolls out, .*; SFTDataModule does not"):
        run_rollout(["--config", "sft.yaml"])
