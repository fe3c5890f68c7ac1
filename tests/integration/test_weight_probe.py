"""The probe of a weight sync in whole fits: what it compares, and what it costs a run whose engine is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_fit import tiny_data, tiny_fit

from lit_rl.callbacks import WeightSync
from lit_rl.callbacks.weight_sync import WeightSyncProbeFailed
from lit_rl.datamodule import RolloutDataModule
from lit_rl.serving.transformers_replica import TransformersReplica


class Watched(RolloutDataModule):
    """Keeps what was compared, and the trajectories there were."""

    def probe_sequences(self, num: int, max_tokens: int) -> list[list[int]]:
        sequences = super().probe_sequences(num, max_tokens)
        everything = [[*t.prompt_ids, *t.response_ids] for t in self.last_trajectories]
        self.asked = [*getattr(self, "asked", []), (sequences, everything)]
        return sequences


def watched_data(**changes: Any) -> Watched:
    data = tiny_data(**changes)
    data.__class__ = Watched
    return data  # type: ignore[return-value]


def test_a_healthy_run_is_probed_on_its_first_rows_and_then_on_its_trajectories() -> None:
    data = watched_data()
    run = tiny_fit(2, data=data, sync=[WeightSync(probe_every=1)]).fit()

    (at_start, nothing), (after_first, first), _ = data.asked
    assert nothing == []
    assert len(at_start) == 4
    assert min(map(len, at_start)) > 5
    assert len(after_first) == 4
    assert all(any(ids[-64:] == sequence for ids in first) for sequence in after_first)
    gaps = run.logger.column("weight_sync/probe_gap_mean")
    assert [iteration for iteration, _ in gaps] == [0, 1]
    assert max(gap for _, gap in gaps) < 1e-5
    assert len(run.logger.column("timing_s/probe_weights")) == 2


def test_a_run_whose_engine_loads_a_tensor_wrongly_ends_before_its_first_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = TransformersReplica._load_bucket

    def load_wrongly(replica: TransformersReplica, path: str) -> None:
        load(replica, path)
        with torch.no_grad():
            replica.model.model.norm.weight.fill_(30.0)

    monkeypatch.setattr(TransformersReplica, "_load_bucket", load_wrongly)
    run = tiny_fit(2)

    with pytest.raises(WeightSyncProbeFailed, match="What would be rolled out is not the policy that is trained"):
        run.fit()

    assert run.iterations == []


def test_a_bf16_trainer_and_engine_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    data = watched_data(serving={"dtype": "bfloat16"})
    run = tiny_fit(1, data=data, precision="bf16-mixed").fit()

    ((_, gap),) = run.logger.column("weight_sync/probe_gap_mean")
    assert 0 < gap < 0.05
