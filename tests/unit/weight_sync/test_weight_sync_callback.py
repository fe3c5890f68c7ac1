"""The callback end to end: a network's weights through shared memory into a transformers replica, inline."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_rl.callbacks import WeightSync
from lit_rl.cluster import Runtime
from lit_rl.experience.progress import PhaseProgress
from lit_rl.models import load_causal_lm, load_tokenizer, resolve_model
from lit_rl.serving import LLMServerManager, ServingSettings
from lit_rl.serving.manager import WeightUpdateFailed
from lit_rl.types import SamplingParams
from lit_rl.weight_sync import shared_memory

MODEL = "bundled/tiny-random"


@cache
def loaded() -> tuple[Any, Any]:
    """Model and tokenizer, read from disk once."""
    return load_causal_lm(MODEL), load_tokenizer(MODEL)


class Run:
    """A trainer, a module and a DataModule, as far as the callback looks at them."""

    def __init__(self, runtime: Runtime, folder: Path, dtype: str) -> None:
        # 1 MiB: the embedding has a bucket of its own.
        serving = ServingSettings(replica="transformers", num_replicas=2, dtype=dtype, weight_bucket_mib=1)
        self.servers = LLMServerManager(runtime, serving, resolve_model(MODEL), 64, gpu=False)
        runtime.loop.run(self.servers.start(), timeout_s=60.0, what="replicas to start")
        self.runtime = runtime
        self.folder = folder
        self.phase = PhaseProgress()
        self.network = copy.deepcopy(loaded()[0])
        data = SimpleNamespace(servers=self.servers, serving=serving, runtime=runtime, phase=self.phase)
        self.trainer: Any = SimpleNamespace(datamodule=data, is_last_batch=True, world_size=1)
        self.logged: dict[str, float] = {}
        self.module: Any = SimpleNamespace(
            actor=SimpleNamespace(network=self.network), policy_version=0, steps_since_sync=0,
            log_dict=lambda values, **_: self.logged.update(values),
        )  # fmt: skip
        self.sync = WeightSync()

    def step(self, size: float) -> None:
        """What an optimizer step and the end of an iteration do."""
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter *= 1 + size * torch.randn(parameter.shape, generator=generator)
        self.module.policy_version += 1
        self.module.steps_since_sync += 1

    def end_batch(self) -> None:
        self.sync.on_train_batch_end(self.trainer, self.module, None, None, 0)

    def sample(self) -> list[Any]:
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)

        async def both() -> list[Any]:
            workers = self.servers.replicas.workers
            calls = (worker.call("generate", [5, 600, 7], sampling, "r", timeout_s=30.0) for worker in workers)
            return await asyncio.gather(*calls)

        return self.runtime.loop.run(both(), timeout_s=60.0, what="samples")

    def expected(self) -> list[int]:
        ids = self.network.generate(torch.tensor([[5, 600, 7]]), do_sample=False, max_new_tokens=6, min_new_tokens=6)
        return ids[0, 3:].tolist()

    def left_behind(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture(params=["float32"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    model, tokenizer = loaded()
    monkeypatch.setattr("lit_rl.models.load_causal_lm", lambda name, dtype: copy.deepcopy(model).to(dtype))
    monkeypatch.setattr("lit_rl.models.load_tokenizer", lambda name: tokenizer)
    original = shared_memory.SharedMemoryBuckets
    monkeypatch.setattr("lit_rl.callbacks.weight_sync.SharedMemoryBuckets", lambda: original(tmp_path))
    with Runtime("inline") as runtime:
        run = Run(runtime, tmp_path, request.param)
        yield run
        run.sync.teardown(run.trainer, run.module, "fit")
        assert list(tmp_path.iterdir()) == []
        runtime.loop.run(run.servers.stop(), timeout_s=30.0, what="replicas to stop")


# O41
def test_replicas_sample_from_the_networks_weights_after_each_sync(run: Run) -> None:
    assert {version for output in run.sample() for version in output.policy_versions} == {-1}
    run.sync.on_train_start(run.trainer, run.module)
    before = run.expected()
    assert [(output.token_ids, output.policy_versions) for output in run.sample()] == [(before, [0] * 6)] * 2

    run.step(0.5)
    run.end_batch()

    assert run.expected() != before
    assert [(out.token_ids, out.policy_versions) for out in run.sample()] == [(run.expected(), [1] * 6)] * 2
    assert run.servers.weights_changed
    assert run.module.steps_since_sync == 0
    assert set(run.logged) == {"timing_s/update_weights"}
    assert run.left_behind() == []


def test_only_the_last_mini_batch_of_an_iteration_syncs(run: Run) -> None:
    run.sync.on_train_start(run.trainer, run.module)
    run.step(0.5)
    run.trainer.is_last_batch = False
    run.end_batch()
    assert set(run.servers.versions.values()) == {0}

    run.trainer.is_last_batch = True
    run.end_batch()
    assert set(run.servers.versions.values()) == {1}


@pytest.mark.parametrize(
    "hook",
    ["on_train_start", "on_sanity_check_start", "on_validation_start", "on_test_start", "on_predict_start"],
)
def test_every_start_syncs_what_is_stale_and_nothing_else(run: Run, hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = []
    begin = run.servers.begin_weight_update
    monkeypatch.setattr(run.servers, "begin_weight_update", lambda: syncs.append(hook) or begin())
    run.module.policy_version = 7  # restored from a checkpoint

    for _ in range(2):
        getattr(run.sync, hook)(run.trainer, run.module)

    assert syncs == [hook]
    assert set(run.servers.versions.values()) == {7}


@pytest.mark.parametrize("run", ["bfloat16"], indirect=True)
def test_steps_too_small_for_the_engines_dtype_are_warned_about(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.sync.on_train_start(run.trainer, run.module)
    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        run.step(1e-7)
        run.end_batch()
        assert "After 1 optimizer steps the replicas hold the same weights as before" in caplog.text
        caplog.clear()
        run.step(0.5)
        run.end_batch()
    assert caplog.text == ""


def test_a_failed_sync_leaves_no_bucket_and_no_version(run: Run) -> None:
    replica = run.servers.replicas.workers[1]._worker.result()

    async def refuse(bucket: dict[str, Any]) -> None:
        raise RuntimeError("no memory")

    replica.update_weights = refuse
    with pytest.raises(WeightUpdateFailed, match="update_weights failed on 1 of 2 replicas: replica-1: .*no memory"):
        run.sync.on_train_start(run.trainer, run.module)

    assert run.left_behind() == []
    with pytest.raises(RuntimeError, match="half-finished update"):
        run.servers.require_version(0, 0)
    run.sync.on_exception(run.trainer, run.module, RuntimeError())
    run.sync.teardown(run.trainer, run.module, "fit")


def test_a_sync_inside_a_validation_leaves_the_phase_as_it_was(run: Run) -> None:
    run.phase.start("validation")
    run.sync.on_validation_start(run.trainer, run.module)
    assert run.phase.phase == "validation"

    run.phase.start("update")
    run.step(0.5)
    run.end_batch()
    assert run.phase.phase == "idle"
