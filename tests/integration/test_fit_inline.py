"""Fits from Python, everything in this process: the promises of an iteration, kept by the real parts together."""

from __future__ import annotations

import logging
import math
import threading

import lightning as L
import pytest
import torch
from replica_standins import RecordingReplica
from tiny_fit import MODEL, spread_reward, tiny_data, tiny_fit

from lit_rl import GRPO
from lit_rl.agents.manager import RolloutFailed
from lit_rl.callbacks import IterationCheckpoint, ValidateFirst
from lit_rl.serving.manager import WeightUpdateFailed
from lit_rl.types import Prompt
from lit_rl.weight_sync.publisher import WeightPublisher

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_one_iteration_is_one_epoch() -> None:  # O45, of a module without a critic
    module = GRPO(MODEL, actor_lr=1e-3, lr_warmup_iterations=2, max_grad_norm=0.01)
    run = tiny_fit(3, data=tiny_data(num_mini_batches=2), module=module).fit()

    assert run.trainer.global_step == 6
    assert run.trainer.current_epoch == 3
    assert run.logger.column("iteration") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    rates = [rate for _, rate in run.logger.column("actor/lr")]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3])  # the schedule steps once per iteration
    assert len(run.recorder.clipped_norms) == 6
    assert max(run.recorder.clipped_norms) == pytest.approx(0.01, rel=1e-3)
    assert min(norm for _, norm in run.logger.column("actor/grad_norm")) > 0.01  # logged as it was before clipping


def test_engine_and_trainer_agree_and_every_token_carries_its_version() -> None:
    run = tiny_fit(3).fit()

    gaps = run.logger.column("rollout_corr/logprob_gap_max")
    assert len(gaps) == 3
    assert max(gap for _, gap in gaps) < 1e-4
    for iteration, trajectories in enumerate(run.iterations):
        assert len(trajectories) == 8
        for trajectory in trajectories:
            assert trajectory.policy_versions == [iteration] * len(trajectory.response_ids)
    assert run.module.policy_version == 3


def test_a_sanity_check_leaves_no_trace() -> None:  # O46
    without = tiny_fit(1).fit()
    checked = tiny_fit(1, num_sanity_val_steps=2).fit()

    assert checked.iterations == [_like(without.iterations[0], checked.iterations[0])]
    assert checked.logger.column("actor/pg_loss") == without.logger.column("actor/pg_loss")
    assert not any(name.startswith("val") for _, row in checked.logger.rows for name in row)


def _like(expected: list, found: list) -> list:
    """Equal but for the times that trajectories note."""
    for one, other in zip(expected, found, strict=True):
        one.metrics = other.metrics
    return expected


def test_a_fit_without_weight_sync_is_refused_before_anything_starts() -> None:  # D10
    run = tiny_fit(1, sync=[])

    with pytest.raises(ValueError, match=r"is the WeightSync callback in trainer\.callbacks\?"):
        run.fit()

    with pytest.raises(RuntimeError, match="between setup and teardown"):
        _ = run.data.runtime
    assert run.module.actor is None


def test_a_publisher_that_publishes_nothing_is_caught_at_the_gate() -> None:  # D10
    class Forgetful(L.Callback, WeightPublisher):
        pass

    with pytest.raises(
        RuntimeError, match=r"hold the weights they were started with, iteration 0 needs version 0: is the WeightSync"
    ):
        tiny_fit(1, sync=[Forgetful()]).fit()


def test_a_number_of_steps_is_refused_as_the_end_of_a_run() -> None:  # D1, O45
    with pytest.raises(ValueError, match=r"trainer\.max_steps=3 .*use trainer\.max_epochs"):
        tiny_fit(1, max_steps=3).fit()


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path) -> None:
    whole = tiny_fit(4, callbacks=[IterationCheckpoint(dirpath=str(tmp_path), keep=-1)]).fit()

    resumed = tiny_fit(4).fit(ckpt_path=str(tmp_path / "iteration_00001.ckpt"))

    assert len(resumed.iterations) == 2
    for expected, found in zip(whole.iterations[2:], resumed.iterations, strict=True):
        # Rows, seeds, tokens, log-probs, versions and rewards: the inline engine computes one sequence at a time.
        assert found == _like(expected, found)
    _assert_equal(resumed.weights(), whole.weights())
    assert resumed.logger.column("actor/pg_loss") == whole.logger.column("actor/pg_loss")[2:]


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_reward_that_raises_once_costs_one_sample(caplog) -> None:  # O28
    calls, lock = [], threading.Lock()

    def fails_on_the_fourth(solution_str: str, ground_truth: str) -> float:
        with lock:
            calls.append(solution_str)
            if len(calls) == 4:
                raise ZeroDivisionError("the fourth sample")
        return spread_reward(solution_str, ground_truth)

    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        run = tiny_fit(1, data=tiny_data(fails_on_the_fourth)).fit()

    (trajectories,) = run.iterations
    failed = [trajectory for trajectory in trajectories if trajectory.has_failed]
    scored = [trajectory.reward for trajectory in trajectories if not trajectory.has_failed]
    assert (len(failed), len(scored)) == (1, 7)
    assert failed[0].reward is None
    assert run.logger.column("rollout/failed_share") == [(0, 0.125)]
    assert run.logger.column("critic/score/mean") == [(0, pytest.approx(sum(scored) / 7))]
    assert caplog.text.count("ZeroDivisionError: the fourth sample") == 1
    assert "Traceback" in caplog.text


def test_a_reward_that_always_raises_stops_the_run_with_its_own_error() -> None:  # O28
    def broken(solution_str: str, ground_truth: str) -> float:
        raise ZeroDivisionError("nothing can be scored")

    with pytest.raises(RolloutFailed, match=r"(?s)All 8 trajectories failed.*ZeroDivisionError: nothing can be scored"):
        tiny_fit(1, data=tiny_data(broken)).fit()


def _prompts(*questions: str) -> list[Prompt]:
    return [
        Prompt(row_id=f"row{n}", messages=[{"role": "user", "content": text}], data_source="test", ground_truth="7")
        for n, text in enumerate(questions)
    ]


def test_prompts_over_the_limit_are_left_out_and_counted(caplog) -> None:
    rows = _prompts("What is 3 + 4?", "What is 3 + 4? " * 20, "What is 5 + 2?")

    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        run = tiny_fit(1, data=tiny_data(train_data=rows, val_data=None)).fit()

    assert {trajectory.row_id for trajectory in run.iterations[0]} == {"row0", "row2"}
    assert "data.train_data: Prompts: 2 kept, 1 too long" in caplog.text


def test_a_prompt_longer_than_the_model_fails_alone(caplog) -> None:
    rows = _prompts("What is 3 + 4?", "What is 3 + 4? " * 6)
    data = tiny_data(train_data=rows, val_data=None, max_prompt_tokens=256, serving={"max_model_len": 64})

    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        run = tiny_fit(1, data=data).fit()

    by_row = {trajectory.row_id: trajectory for trajectory in run.iterations[0]}
    assert not by_row["row0"].has_failed
    assert "data.serving.max_model_len=64 leaves no room" in by_row["row1"].error
    assert run.logger.column("rollout/failed_share") == [(0, 0.5)]


def test_empty_responses_are_scored_and_finite() -> None:  # O16
    seen = []

    def reward(solution_str: str, ground_truth: str) -> float:
        seen.append(solution_str)
        return float(bool(solution_str))

    run = tiny_fit(1, data=tiny_data(reward, serving={"replica": "replica_standins.OftenSilentReplica"})).fit()

    empty = [trajectory for trajectory in run.iterations[0] if not trajectory.response_ids]
    assert len(empty) == 4
    assert {trajectory.reward for trajectory in empty} == {0.0}
    assert seen.count("") >= 4
    assert run.logger.column("response/empty_share") == [(0, 0.5)]
    assert all(math.isfinite(value) for _, row in run.logger.rows for value in row.values())
    assert run.trainer.global_step == 1


def test_only_empty_responses_skip_the_step() -> None:  # O16
    run = tiny_fit(1, data=tiny_data(serving={"replica": "replica_standins.SilentReplica"}))
    run.module.configure_model()
    before = run.weights()

    run.fit()

    _assert_equal(run.weights(), before)
    assert run.logger.column("actor/skipped_weightless_steps") == [(0, 1.0)]
    assert all(math.isfinite(value) for _, row in run.logger.rows for value in row.values())


def test_equal_rewards_move_nothing_after_ordinary_steps() -> None:  # O22
    def reward(solution_str: str, ground_truth: str) -> float:
        return 0.3 if run.trainer.current_epoch == 3 else spread_reward(solution_str, ground_truth)

    run = tiny_fit(3, data=tiny_data(reward))
    run.fit()
    before = run.weights()
    run.trainer.fit_loop.max_epochs = 4
    run.trainer.fit(run.module, datamodule=run.data)

    assert len(run.iterations) == 4
    assert [share for _, share in run.logger.column("critic/zero_spread_group_share")][-1] == 1.0
    _assert_equal(run.weights(), before)


def test_validation_before_during_and_after_training() -> None:
    run = tiny_fit(2, callbacks=[ValidateFirst()], check_val_every_n_epoch=2).fit()

    # The x-axis is the version of the weights: 0 before training, 2 after two iterations.
    assert [step for step, _ in run.logger.column("val-core/arithmetic/reward/mean@1")] == [0, 2]
    assert len(run.data.last_validation_trajectories) == 3
    assert {v for t in run.data.last_validation_trajectories for v in t.policy_versions} == {2}
    assert run.logger.column("iteration") == [(0, 0.0), (1, 1.0)]


def test_validate_test_and_predict_roll_out_every_row_once() -> None:
    run = tiny_fit(data=tiny_data(test_data=tiny_data().sources["train"]))

    (validated,) = run.trainer.validate(run.module, datamodule=run.data, verbose=False)
    (tested,) = run.trainer.test(run.module, datamodule=run.data, verbose=False)
    batches = run.trainer.predict(run.module, datamodule=run.data)

    rewards = [trajectory.reward for trajectory in batches[0]]
    assert len({trajectory.row_id for trajectory in batches[0]}) == len(rewards) == 12
    assert tested["val-core/arithmetic/reward/mean@1"] == pytest.approx(sum(rewards) / 12)
    assert 0.0 <= validated["val-core/arithmetic/reward/mean@1"] <= 1.0


def test_a_second_fit_in_the_same_process_starts_at_iteration_0() -> None:
    first = tiny_fit(1).fit()

    second = tiny_fit(1, data=first.data, module=first.module).fit()

    assert second.logger.column("iteration") == [(0, 0.0)]
    assert {v for t in second.iterations[0] for v in t.policy_versions} == {0}
    assert second.iterations[0] != first.iterations[0]


def test_a_weight_update_keeps_its_order_on_every_replica() -> None:  # O41
    RecordingReplica.calls.clear()
    serving = {"replica": "replica_standins.RecordingReplica", "num_replicas": 2, "weight_bucket_mib": 8}

    tiny_fit(1, data=tiny_data(serving=serving)).fit()

    for rank in (0, 1):
        calls = [call for caller, call in RecordingReplica.calls if caller == rank]
        first, second = calls[: len(calls) // 2], calls[len(calls) // 2 :]
        num_buckets = first.count("bucket")
        assert num_buckets >= 2
        for version, update in enumerate((first, second)):
            assert update == ["pause", "wake", "start", *["bucket"] * num_buckets, f"finish {version}", "resume"]


def test_a_replica_that_refuses_weights_is_named() -> None:  # O41
    serving = {"replica": "replica_standins.SecondRefusesWeightsReplica", "num_replicas": 2}

    with pytest.raises(
        WeightUpdateFailed,
        match=r"update_weights failed on 1 of 2 replicas: replica-1: OSError: the bucket cannot be read",
    ):
        tiny_fit(1, data=tiny_data(serving=serving)).fit()
