"""Resuming at places where a counter turns over, and with another configuration, from real checkpoints."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_fit import MODEL, TinyFit, tiny_data, tiny_fit

from lit_rl import GRPO, PPO
from lit_rl.callbacks import IterationCheckpoint
from lit_rl.data import Arithmetic

pytestmark = pytest.mark.usefixtures("nothing_left")


def _identities(run: TinyFit) -> list[list[tuple[str, int, int | None]]]:
    return [[(t.row_id, t.sample_index, t.seed) for t in iteration] for iteration in run.iterations]


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# Two rows per iteration. Of four rows a pass ends with iteration 1, of three in the middle of it.
@pytest.mark.parametrize("num_rows", [4, 3])
def test_a_resume_where_a_pass_over_the_rows_ends_equals_the_uninterrupted_run(num_rows, tmp_path) -> None:
    def data() -> Any:
        return tiny_data(train_data=Arithmetic(split="train", num_rows=num_rows, max_operand=9), seed=5)

    whole = tiny_fit(4, data=data(), callbacks=[IterationCheckpoint(dirpath=str(tmp_path), keep=-1)]).fit()
    resumed = tiny_fit(4, data=data()).fit(ckpt_path=str(tmp_path / "iteration_00001.ckpt"))

    assert _identities(resumed) == _identities(whole)[2:]
    _assert_equal(resumed.weights(), whole.weights())
    rows = [row for iteration in _identities(whole) for row, _, _ in iteration[::4]]
    assert len(set(rows[:num_rows])) == num_rows  # the first pass has every row
    if num_rows == 4:
        assert set(rows[4:]) == set(rows[:4])
        assert rows[4:] != rows[:4]  # and the second an order of its own


def test_a_learning_rate_that_was_changed_wins_over_the_checkpoints(tmp_path, caplog) -> None:  # D16
    tiny_fit(1, callbacks=[IterationCheckpoint(dirpath=str(tmp_path))]).fit()

    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        changed = tiny_fit(2, module=GRPO(MODEL, actor_lr=2e-4, weight_decay=0.1)).fit(str(tmp_path / "last.ckpt"))

    assert changed.logger.column("actor/lr") == [(1, pytest.approx(2e-4))]
    assert caplog.text.count("differ from the configuration's (0.0002, 0.1), which are used") == 1
    assert changed.module.policy_version == 2


def test_checkpoints_of_a_real_run_load_in_torchs_strict_mode(tmp_path) -> None:
    checkpoints = [
        IterationCheckpoint(dirpath=str(tmp_path)),
        IterationCheckpoint(dirpath=str(tmp_path), monitor="val-core/arithmetic/reward/mean@1"),
    ]
    module = PPO(MODEL, actor_lr=1e-3, kl_reward_coef=0.1, kl_reward_target=0.01)
    tiny_fit(1, module=module, callbacks=checkpoints, check_val_every_n_epoch=1).fit()

    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best_iteration_00000.ckpt", "iteration_00000.ckpt", "last.ckpt"]
    for name in names:
        content = torch.load(tmp_path / name, weights_only=True)
        assert content["lit_rl_policy_version"] == 1
        assert content["RolloutDataModule"]["cursor"]["position"] == 2
        assert content["lit_rl_kl_controller"]
        assert {*content["lit_rl_random_states"][0]} == {"python", "numpy", "torch"}
