"""Two real vLLM engines on one machine: both sample, and both get every iteration's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from tagged_run import REWARD_FILE
from tiny_fit import tiny_data, tiny_fit

from lit_rl.rewards import RewardSettings

pytestmark = [pytest.mark.engine, pytest.mark.slow]


class LookAtReplicas(L.Callback):
    """Asks both replicas at the end of each iteration."""

    def __init__(self) -> None:
        self.seen: list[list[dict[str, Any]]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self.seen.append(data.runtime.loop.run(data.servers.health(), timeout_s=60, what="the replicas to answer"))


@pytest.mark.usefixtures("nothing_left")
def test_two_replicas_share_the_requests_and_get_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD_FILE)
    look = LookAtReplicas()
    serving = {"replica": "replica_standins.CountingVLLMReplica", "num_replicas": 2, "kv_cache_gib": 0.25}
    run = tiny_fit(
        2,
        data=tiny_data(
            serving={**serving, "threads_per_replica": 1, "max_num_seqs": 8},
            rewards=RewardSettings(function=str(tmp_path / "rewards.py"), num_workers=1),
            val_data=None,
            backend="ray",
            num_cpus=2,
        ),
        callbacks=[look],
    )

    run.fit()

    # Eight trajectories an iteration, each to the replica with the fewest in flight.
    assert [[replica["num_requests"] for replica in replicas] for replicas in look.seen] == [[4, 4], [8, 8]]
    assert [[replica["version"] for replica in replicas] for replicas in look.seen] == [[1, 1], [2, 2]]
    assert [{t.version_range for t in iteration} for iteration in run.iterations] == [{(0, 0)}, {(1, 1)}]
    # Both hold what the trainer holds: their log-probs are the trainer's.
    gaps = [gap for _, gap in run.logger.column("rollout_corr/logprob_gap_max")]
    assert len(gaps) == 2
    assert all(gap < 1e-3 for gap in gaps)
