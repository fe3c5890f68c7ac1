"""Bring the module's weights into the replicas, and prove that they arrived.

It acts before the first rollout, after an iteration's last optimizer step, and before validation, test and predict
whenever the replicas hold another version than the module. Each sync checks the bytes received under every name and
that all replicas hold the same weights (design D10). Every few syncs, trainer and replicas score the same few tokens:
before anything is rolled out with the weights, and replica by replica. Afterwards the same gap is measured on every
trained token of every iteration (``rollout_corr/logprob_gap_*``).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lit_rl.weight_sync.probe import ProbeGaps, ask_replicas, compare
from lit_rl.weight_sync.publisher import WeightPublisher
from lit_rl.weight_sync.shared_memory import SharedMemoryBuckets
from lit_rl.weight_sync.source import stream_weights

if TYPE_CHECKING:
    from lit_rl.datamodule import RolloutDataModule
    from lit_rl.modules import PolicyGradientModule

log = logging.getLogger(__name__)


_PROBE_SEQUENCES = 4
_PROBE_TOKENS = 64
"""Tokens of each sequence; 252 in all are scored, in about half a second for 135 M parameters on a busy core."""


class WeightSyncProbeFailed(RuntimeError):
    """After a sync a replica computes something else than the trainer."""


class WeightSync(Callback, WeightPublisher):
    """Pushes weights through shared memory; bucket size, dtype and time-outs are ``data.serving``'s."""

    def __init__(
        self, probe_every: int = 10, probe_gap_warning: float = 0.1, probe_gap_error: float | None = 0.5
    ) -> None:
        """Keep the options.

        The thresholds come from SmolLM2-135M, where trainer and vLLM both compute in bfloat16: they are 0.03 to 0.05
        nats apart on average (1e-6 in float32). With one matrix of one layer zeroed or swapped they are 0.13 to 0.4
        apart in late layers and 1.6 to 9 in the first, with a wrong norm or head 2 to 9. So a warning is at least twice
        what is healthy and sees all of these, and only what no rounding explains stops a run.

        Args:
            probe_every: Compare log-probs of trainer and replicas after the first sync and every so many after it; 0 is
                off.
            probe_gap_warning: Warn when a replica's differ by more than this on average, nats per token, above 0.
            probe_gap_error: Stop the run when they differ by more than this; ``null`` never does.
        """
        if probe_every < 0:
            raise ValueError(f"WeightSync(probe_every={probe_every}) must be at least 0 syncs (0 is off).")
        if not probe_gap_warning > 0:
            raise ValueError(f"WeightSync(probe_gap_warning={probe_gap_warning}) must be above 0 nats per token.")
        if probe_gap_error is not None and not probe_gap_error >= probe_gap_warning:
            raise ValueError(
                f"WeightSync(probe_gap_error={probe_gap_error}) must be at least "
                f"probe_gap_warning={probe_gap_warning}, or null."
            )
        self.probe_every = probe_every
        self.probe_gap_warning = probe_gap_warning
        self.probe_gap_error = probe_gap_error
        self._num_syncs = 0
        self._sync_s = 0.0
        self._not_logged: dict[str, float] = {}
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
        self._sync_if_stale(trainer, pl_module)
        metrics = {"timing_s/update_weights": self._sync_s, **self._not_logged}
        self._not_logged = {}
        pl_module.log_dict(metrics, on_step=False, on_epoch=True, batch_size=1)

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
        self._sync_s = 0.0
        # Rank 0 has the replicas (none where a recording is replayed); all ranks take part in gathering the weights.
        is_stale = data.servers is not None and set(data.servers.versions.values()) != {module.policy_version}
        if trainer.world_size > 1:
            is_stale = trainer.strategy.broadcast(is_stale)
        if not is_stale:
            return
        phase_before = data.phase.phase
        data.phase.start("weight_sync")
        started = time.perf_counter()
        if data.servers is None:
            for _ in stream_weights(module.actor.network, *_bucket_settings(data), is_sender=False):
                pass
        else:
            self._sync(data, module)
        module.steps_since_sync = 0
        self._sync_s = time.perf_counter() - started
        if self.probe_every and self._num_syncs % self.probe_every == 0:
            self._probe(trainer, data, module)
        self._num_syncs += 1
        data.phase.start(phase_before if phase_before == "validation" else "idle")

    def _sync(self, data: RolloutDataModule, module: PolicyGradientModule) -> None:
        """Pause, send every bucket, verify, resume."""
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

    def _probe(self, trainer: L.Trainer, data: RolloutDataModule, module: PolicyGradientModule) -> None:
        """Score a few tokens on every replica and in the trainer, on all its ranks, and judge the gaps."""
        started = time.perf_counter()
        sequences = [] if data.servers is None else data.probe_sequences(_PROBE_SEQUENCES, _PROBE_TOKENS)
        if trainer.world_size > 1:
            sequences = trainer.strategy.broadcast(sequences)
        own = module.sequence_logprobs(sequences) if sequences else []
        if data.servers is None:
            return
        if not sequences:
            log.warning("There is no text to compare the replicas with the trainer on: the probe is left out.")
            return
        answers = data.runtime.loop.run(
            ask_replicas(data.servers, sequences, module.policy_version),
            timeout_s=data.serving.request_timeout_s,
            what=f"replicas to score {len(sequences)} short sequences after a weight sync",
        )
        gaps = compare(own, answers)
        self._not_logged = {**gaps.metrics(), "timing_s/probe_weights": time.perf_counter() - started}
        self._judge(gaps, module.policy_version)

    def _judge(self, gaps: ProbeGaps, version: int) -> None:
        """Warn, or stop the run; NaN counts as too far."""
        if self.probe_gap_error is not None and not gaps.worst <= self.probe_gap_error:
            raise WeightSyncProbeFailed(
                f"After the sync of version {version}: {gaps.describe()} (error above probe_gap_error="
                f"{self.probe_gap_error} of the WeightSync callback). What would be rolled out is not the policy that "
                "is trained. Restart the run; if it stays, the engine loads this model's weights wrongly: try "
                "data.serving.replica=transformers. Where the gap is known and meant, raise probe_gap_error."
            )
        if not gaps.worst <= self.probe_gap_warning:
            log.warning(
                "After the sync of version %d: %s (warning above probe_gap_warning=%s of the WeightSync callback).",
                version,
                gaps.describe(),
                self.probe_gap_warning,
            )

    def _close(self) -> None:
        if self._buckets is not None:
            self._buckets.close()
            self._buckets = None


def _bucket_settings(data: RolloutDataModule) -> tuple[int, torch.dtype]:
    """Bytes of a bucket and dtype of the weights; the same on every rank, or gathering would not be."""
    return data.serving.weight_bucket_mib << 20, getattr(torch, data.serving.dtype)
