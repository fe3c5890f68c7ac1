"""The examples in a fit, as their first comment says to run them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_rl.cli import build_from_config
from lit_rl.rollout_command import run_rollout

pytestmark = pytest.mark.usefixtures("nothing_left")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "num_turns"),
    [([], 2), (["--data.init_args.agents.default_agent_loop=examples/own_agent_loop.py:SelfCheckAgentLoop",
                "--data.init_args.agents.default_options={}"], 4),
     (["--data.init_args.agents.default_agent_loop=openai_agent",
       "--data.init_args.agents.default_options={agent: 'examples/openai_agent.py:agent', "
       "agent_tools: 'examples/openai_agent.py:TOOLS'}"], 2)],
    ids=["tools", "agent loop", "openai agent"],
)  # fmt: skip
def test_own_tools_loop_and_reward_run_together(
    arguments: list[str], num_turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    options = [f"--runs_dir={tmp_path}", "--trainer.accelerator=cpu", "--trainer.devices=1", *arguments]
    run = build_from_config("examples/own_parts.yaml", options)
    run.trainer.fit(run.model, datamodule=run.datamodule)

    assert run.run_folder is not None
    lines = (run.run_folder / "trajectories" / "iteration_00000.jsonl").read_text().splitlines()
    trajectories = [json.loads(line) for line in lines]
    assert [trajectory["error"] for trajectory in trajectories] == [None] * 8
    assert "has_number" in trajectories[0]["reward_parts"]
    assert max(trajectory["num_turns"] for trajectory in trajectories) == num_turns
    if not arguments:
        assert "calculator" in trajectories[0]["input"]
        assert "digits" in trajectories[0]["input"]


def test_one_conversation_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    run_rollout(["--config", "configs/base/trainer_cpu.yaml", "--config", "examples/own_parts.yaml", "--row", "3"])
    out = capsys.readouterr().out
    assert "row arithmetic/" in out
    assert "<tools>" in out
    assert "-- policy, 96 tokens, weights of version 0" in out
    assert "has_number" in out
