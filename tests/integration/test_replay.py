"""A run from its recorded trajectories: the same updates, bit for bit, and no engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_fit import MODEL, TinyFit, tiny_data, tiny_fit

from lit_rl import GRPO, PPO
from lit_rl.agents import AgentLoopManager
from lit_rl.callbacks import IterationCheckpoint
from lit_rl.cluster import Runtime
from lit_rl.modules import ReMax
from lit_rl.serving import LLMServerManager

pytestmark = pytest.mark.usefixtures("nothing_left")


def _record(folder: Path, iterations: int, module: GRPO | None = None, **options: Any) -> TinyFit:
    return tiny_fit(
        iterations,
        data=tiny_data(record_trajectories=True, **options),
        module=module,
        callbacks=[IterationCheckpoint(keep=-1)],
        default_root_dir=folder,
    ).fit()


def _never(solution_str: str, ground_truth: str) -> float:
    raise AssertionError("a replay scores nothing")


def _replay(
    folder: Path, iterations: int, module: GRPO | None = None, ckpt_path: Any = None, **options: Any
) -> TinyFit:
    data = tiny_data(_never, replay_from=str(folder), backend="ray", **options)
    # Validation is asked for after every iteration, and there is no engine for it.
    return tiny_fit(iterations, data=data, module=module, check_val_every_n_epoch=1).fit(ckpt_path)


def _forbid_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a replay starts nothing")

    for owner, name in ((LLMServerManager, "start"), (AgentLoopManager, "start"), (Runtime, "_connect")):
        monkeypatch.setattr(owner, name, refuse)


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_three_further_iterations_from_a_recording_give_equal_weights(tmp_path, monkeypatch) -> None:
    run = _record(tmp_path, 4, num_mini_batches=2, ppo_epochs=2)
    _forbid_engines(monkeypatch)

    checkpoint = tmp_path / "checkpoints/iteration_00000.ckpt"
    replayed = _replay(tmp_path, 4, ckpt_path=checkpoint, num_mini_batches=2, ppo_epochs=2)

    assert replayed.iterations == run.iterations[1:]  # times included: they are the recorded ones
    _assert_equal(replayed.weights(), run.weights())
    assert replayed.logger.column("actor/pg_loss") == run.logger.column("actor/pg_loss")[1:]
    assert not any(name.startswith("val") for _, row in replayed.logger.rows for name in row)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(PPO, {}), (ReMax, {"greedy_baseline": True}), (GRPO, {"dynamic_sampling_rounds": 2, "prompts_per_iteration": 3})],
    ids=["critic", "greedy baseline", "dynamic sampling"],
)
def test_what_an_algorithm_rolls_out_beside_is_recorded_too(algorithm, options, tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    run = _record(tmp_path, 2, algorithm(MODEL, actor_lr=1e-3), **options)
    _forbid_engines(monkeypatch)

    torch.manual_seed(0)  # a critic's head begins at random
    replayed = _replay(tmp_path, 2, algorithm(MODEL, actor_lr=1e-3), **options)

    assert replayed.iterations == run.iterations
    _assert_equal(replayed.weights(), run.weights())


def test_a_recording_is_learnt_from_in_another_way(tmp_path, monkeypatch) -> None:
    run = _record(tmp_path, 1)
    _forbid_engines(monkeypatch)

    replayed = _replay(tmp_path, 1, GRPO(MODEL, actor_lr=1e-2), ppo_epochs=3)

    assert (run.trainer.global_step, replayed.trainer.global_step) == (1, 3)
    assert replayed.iterations == run.iterations


def test_what_a_recording_lacks_is_said_before_or_when_it_is_needed(tmp_path, monkeypatch) -> None:
    _record(tmp_path, 1)
    _forbid_engines(monkeypatch)

    with pytest.raises(ValueError, match=r"other settings: data\.group_size was 4 and is 8\."):
        _replay(tmp_path, 1, group_size=8)
    with pytest.raises(FileNotFoundError, match=r"lacks iteration 1; it holds 1 iterations from 0 to 0"):
        _replay(tmp_path, 2)
    replay = tiny_fit(data=tiny_data(replay_from=str(tmp_path)))
    with pytest.raises(ValueError, match=r"only fit is replayed\."):
        replay.trainer.validate(replay.module, datamodule=replay.data)
