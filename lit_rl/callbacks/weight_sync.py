"""Bring the module's weights into the replicas, and prove that they arrived.

It acts before the first rollout, after an iteration's last optimizer step, and before validation, test and predict
whenever the replicas hold another version than the module. Each sync checks the bytes received under every name and
that all replicas hold the same weights (design D10). That the engine computes what the trainer computes is measured on
every trained token of every iteration (``rollout_corr/logprob_gap_*``).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_rl.weight_sync.publisher import WeightPublisher
from lit_rl.weight_sync.shared_memory import SharedMemoryBuckets
from lit_rl.weight_sync.source import stream_weights

if TYPE_CHECKING:
    from lit_rl.datamodule import RolloutDataModule
    from lit_rl.modules import PolicyGradientModule

log = logging.getLogger(__name__)


class WeightSync(Callback, WeightPublisher):
    """Pushes weights through shared memory. Has no options: bucket size, dtype and time-outs are ``data.serving``'s."""

    def __init__(self) -> None:
        self._buckets: SharedMemoryBuckets | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first sync: after a checkpoint's weights were restored, before the first rollout."""
        self._sync_if_stale(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sync after the iteration's last mini-batch."""
        if not trainer.is_last_batch:
            return
        started = time.perf_counter()
        self._sync_if_stale(trainer, pl_module)
        seconds = {"timing_s/update_weights": time.perf_counter() - started}
        pl_module.log_dict(seconds, on_step=False, on_epoch=True, batch_size=1)

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the module's weights, not the ones the engines were started with."""
        self._sync_if_stale(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Score the module's weights: ``validate --ckpt_path`` means the checkpoint."""
        self._sync_if_stale(trainer, pl_module)

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As for validation."""
        self._sync_if_stale(trainer, pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """As for validation."""
        self._sync_if_stale(trainer, pl_module)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave nothing in shared memory."""
        self._close()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave nothing in shared memory: Lightning calls no `teardown` after an exception (2.6)."""
        self._close()

    def _sync_if_stale(self, trainer: L.Trainer, module: Any) -> None:
        data: RolloutDataModule = trainer.datamodule  # type: ignore[attr-defined]
        # Rank 0 has the replicas; all ranks take part in gathering the weights.
        is_stale = data.servers is not None and set(data.servers.versions.values()) != {module.policy_version}
        if trainer.world_size > 1:
            is_stale = trainer.strategy.broadcast(is_stale)
        if not is_stale:
            return
        if data.servers is None:
            for _ in stream_weights(module.actor.network, *_bucket_settings(data), is_sender=False):
                pass
            module.steps_since_sync = 0
        else:
            self._sync(data, module)

    def _sync(self, data: RolloutDataModule, module: PolicyGradientModule) -> None:
        """Pause, send every bucket, verify, resume."""
        phase_before = data.phase.phase
        data.phase.start("weight_sync")
        servers, settings, run = data.servers, data.serving, data.runtime.loop.run
        assert servers is not None
        assert module.actor is not None
        if self._buckets is None:
            self._buckets = SharedMemoryBuckets()
        timeout_s = settings.weight_update_timeout_s
        run(servers.begin_weight_update(), timeout_s=3 * timeout_s, what="replicas to pause for a weight update")
        bytes_sent: dict[str, int] = {}
        for bucket in stream_weights(module.actor.network, *_bucket_settings(data)):
            path = self._buckets.write(bucket)
            bytes_sent |= {name: tensor.numel() * tensor.element_size() for name, tensor in bucket}
            try:
                run(
                    servers.send_bucket({"path": str(path)}),
                    timeout_s=timeout_s,
                    what="replicas to load a weight bucket",
                )
            finally:
                self._buckets.release(Path(path))
        version = module.policy_version
        run(
            servers.finish_weight_update(version, bytes_sent),
            timeout_s=2 * timeout_s,
            what=f"replicas to take version {version}",
        )
        if module.steps_since_sync > 0 and not servers.weights_changed:
            log.warning(
                "After %d optimizer steps the replicas hold the same weights as before: the steps are too small for "
                "data.serving.dtype=%s.",
                module.steps_since_sync,
                settings.dtype,
            )
        module.steps_since_sync = 0
        data.phase.start(phase_before if phase_before == "validation" else "idle")

    def _close(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None


def _bucket_settings(data: RolloutDataModule) -> tuple[int, torch.dtype]:
    """Bytes of a bucket and dtype of the weights; the same on every rank, or gathering would not be."""
    return data.serving.weight_bucket_mib << 20, getattr(torch, data.serving.dtype)
