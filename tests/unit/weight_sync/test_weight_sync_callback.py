"""The callback end to end: a network's weights through shared memory into a transformers replica, inline."""

from __future__ import annotations

import asyncio
import copy
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lit_rl.callbacks import WeightSync
from lit_rl.callbacks import weight_sync as weight_sync_module
from lit_rl.callbacks.weight_sync import WeightSyncProbeFailed
from lit_rl.cluster import Runtime
from lit_rl.experience.progress import PhaseProgress
from lit_rl.models import load_causal_lm, load_tokenizer, resolve_model
from lit_rl.serving import LLMServerManager, ServingSettings
from lit_rl.serving.manager import WeightUpdateFailed
from lit_rl.types import SamplingParams
from lit_rl.weight_sync import shared_memory

MODEL = "bundled/tiny-random"
PROBED = [[5, 600, 7, 80], [9, 10, 11], [400, 3]]
PROBE_METRICS = {f"weight_sync/probe_{name}" for name in ("gap_mean", "gap_max", "replica_gap_mean")}


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
        data = SimpleNamespace(
            servers=self.servers, serving=serving, runtime=runtime, phase=self.phase,
            probe_sequences=lambda num, max_tokens: PROBED[:num],
        )  # fmt: skip
        self.trainer: Any = SimpleNamespace(datamodule=data, is_last_batch=True, world_size=1)
        self.logged: dict[str, float] = {}
        self.module: Any = SimpleNamespace(
            actor=SimpleNamespace(network=self.network), policy_version=0, steps_since_sync=0,
            log_dict=lambda values, **_: self.logged.update(values), sequence_logprobs=self.logprobs,
        )  # fmt: skip
        self.sync = WeightSync()

    def logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """What the trainer's module says about all tokens but the first."""
        with torch.no_grad():
            tables = [self.network(torch.tensor([ids])).logits[0].float().log_softmax(-1) for ids in sequences]
        return [
            [table[i, token].item() for i, token in enumerate(ids[1:])]
            for table, ids in zip(tables, sequences, strict=True)
        ]

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
    assert run.logged.pop("weight_sync/probe_gap_max") < 1e-4
    # Of the first sync; the second was not probed.
    assert set(run.logged) == {"timing_s/update_weights", "timing_s/probe_weights"} | PROBE_METRICS - {
        "weight_sync/probe_gap_max"
    }
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


def load_wrongly(run: Run, rank: int, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """From now on replica ``rank`` receives everything, says so, and computes with another tensor ``name``."""
    replica = run.servers.replicas.workers[rank]._worker.result()
    report = replica.finish_weight_update

    async def report_then_spoil(version: int) -> Any:
        answer = await report(version)
        parameter = dict(replica.model.named_parameters())[name]
        with torch.no_grad():
            parameter.copy_(change(parameter))
        return answer

    replica.finish_weight_update = report_then_spoil


# A fault as vLLM 0.32 had: what was received is right, what it multiplies with is not.
def test_a_replica_that_computes_with_other_weights_than_it_received_stops_the_run_and_is_named(run: Run) -> None:
    load_wrongly(run, 1, "model.layers.1.mlp.down_proj.weight", lambda tensor: 40 * tensor.flip(0))
    run.sync = WeightSync(probe_gap_error=0.1)

    with pytest.raises(WeightSyncProbeFailed) as failure:
        run.sync.on_train_start(run.trainer, run.module)

    words = str(failure.value)
    assert re.search(r"version 0: mean gap .* over 6 tokens: replica-0 0\.0000, replica-1 [1-9]?\d*\.\d+ nats", words)
    assert "the replicas differ among themselves" in words
    assert "above probe_gap_error=0.1" in words
    assert run.left_behind() == []


def test_replicas_that_agree_and_differ_from_the_trainer_are_warned_about_below_the_error(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        load_wrongly(run, rank, "model.embed_tokens.weight", lambda tensor: 1.2 * tensor)
    run.sync = WeightSync(probe_gap_warning=0.001, probe_gap_error=None)

    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        run.sync.on_train_start(run.trainer, run.module)

    assert "the replicas agree among themselves: the engine computes otherwise than the trainer" in caplog.text
    assert "(warning above probe_gap_warning=0.001" in caplog.text
    run.step(0.01)
    run.end_batch()
    assert run.logged["weight_sync/probe_gap_mean"] > 0.001
    assert run.logged["weight_sync/probe_replica_gap_mean"] == 0.0


def test_a_replica_that_computes_nan_stops_the_run(run: Run) -> None:
    load_wrongly(run, 1, "model.norm.weight", lambda tensor: tensor * float("nan"))

    with pytest.raises(WeightSyncProbeFailed, match="replica-1 nan"):
        run.sync.on_train_start(run.trainer, run.module)


@pytest.mark.parametrize(("every", "probed"), [(0, []), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_the_first_sync_is_probed_and_every_few_after_it(
    run: Run, every: int, probed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.sync = WeightSync(probe_every=every)
    versions: list[int] = []
    ask = weight_sync_module.ask_replicas

    def remember(servers: Any, sequences: Any, version: int) -> Any:
        versions.append(version)
        return ask(servers, sequences, version)

    monkeypatch.setattr(weight_sync_module, "ask_replicas", remember)
    run.sync.on_train_start(run.trainer, run.module)
    for _ in range(3):
        run.step(0.01)
        run.end_batch()

    assert versions == probed


def test_without_text_there_is_no_probe(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.trainer.datamodule.probe_sequences = lambda num, max_tokens: []
    with caplog.at_level(logging.WARNING, logger="lit_rl"):
        run.sync.on_train_start(run.trainer, run.module)
    assert "the probe is left out" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"probe_every": -1}, "probe_every=-1"),
        ({"probe_gap_warning": float("nan")}, "probe_gap_warning=nan"),
        ({"probe_gap_error": 0.01}, r"probe_gap_error=0.01\) must be at least probe_gap_warning=0.1"),
    ],
)
def test_a_probe_option_out_of_range_is_named_with_its_rule(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        WeightSync(**options)
