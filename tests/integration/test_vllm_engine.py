"""One real vLLM engine over Ray: it computes what the trainer computes, also after and during weight updates.

The engine starts once for the file. Weights reach it through the WeightSync callback itself.
"""

from __future__ import annotations

import asyncio
import copy
import csv
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tagged_run import the_run_folder, write_recipe

from lit_rl.callbacks import WeightSync
from lit_rl.callbacks.weight_sync import WeightSyncProbeFailed
from lit_rl.cluster import Runtime, WorkerHandle
from lit_rl.experience.progress import PhaseProgress
from lit_rl.models import Actor, load_causal_lm, pack, resolve_model
from lit_rl.serving import LLMServerManager, ServingSettings
from lit_rl.types import SamplingParams, ScoreOutput, TokenOutput

pytestmark = pytest.mark.engine

MODEL = "bundled/tiny-random"
MAX_MODEL_LEN = 2048
# Longer than two cache blocks, so that a second request finds it in the prefix cache.
PROMPT = [(7 * position) % 1000 + 100 for position in range(80)]


class Engine:
    """The engine, with the trainer's copy of the policy beside it."""

    def __init__(self, runtime: Runtime, settings: ServingSettings) -> None:
        self.runtime = runtime
        self.children_before: set[psutil.Process] = set()
        self.servers = LLMServerManager(runtime, settings, resolve_model(MODEL), MAX_MODEL_LEN, gpu=False)
        self.runtime.loop.run(self.servers.start(), timeout_s=300, what="the engine to start")
        self.actor = Actor(load_causal_lm(MODEL))
        self.module = SimpleNamespace(
            actor=self.actor, policy_version=0, steps_since_sync=0, sequence_logprobs=self.sequence_logprobs
        )
        self.trainer: Any = SimpleNamespace(
            datamodule=SimpleNamespace(
                servers=self.servers,
                serving=settings,
                runtime=runtime,
                phase=PhaseProgress(),
                probe_sequences=lambda num, max_tokens: [PROMPT, PROMPT[::-1], PROMPT[:9]],
            ),
            world_size=1,
        )
        # Every sync of this file is probed, and must pass.
        self.weight_sync = WeightSync(probe_every=1, probe_gap_warning=1e-4, probe_gap_error=1e-3)
        self.sync()

    @property
    def replica(self) -> WorkerHandle:
        assert self.servers.replicas is not None
        return self.servers.replicas.workers[0]

    def sync(self) -> None:
        self.weight_sync.on_train_start(self.trainer, self.module)  # type: ignore[arg-type]

    def sequence_logprobs(self, sequences: list[list[int]]) -> list[list[float]]:
        """What the trainer's module says about all tokens but the first."""
        prompts, responses = [ids[:1] for ids in sequences], [ids[1:] for ids in sequences]
        packed = pack(prompts, responses, [[1] * len(ids) for ids in responses], share_prompts=False)
        with torch.no_grad():
            rows = self.actor(packed, 1.0).logprobs.tolist()
        return [row[: len(ids)] for row, ids in zip(rows, responses, strict=True)]

    def score(self, prompt_ids: list[int], response_ids: list[int], **options: Any) -> ScoreOutput:
        call = self.replica.call("score", prompt_ids, response_ids, f"s{time.monotonic_ns()}", timeout_s=120, **options)
        output: ScoreOutput = self.run(call)
        return output

    def change_weights(self, seed: int) -> None:
        """Another policy under the next version."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.actor.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        self.module.policy_version += 1
        self.sync()

    def generate(self, prompt_ids: list[int] = PROMPT, **sampling: Any) -> TokenOutput:
        return self.run(self.request(prompt_ids, **sampling))

    async def request(
        self, prompt_ids: list[int] = PROMPT, request_id: str | None = None, **sampling: Any
    ) -> TokenOutput:
        params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **sampling})
        name = request_id or f"request-{time.monotonic_ns()}"
        output: TokenOutput = await self.replica.call("generate", prompt_ids, params, name, timeout_s=120)
        return output

    def run(self, coroutine: Any) -> Any:
        return self.runtime.loop.run(coroutine, timeout_s=150, what="the engine to answer")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = ServingSettings(dtype="float32", kv_cache_gib=0.25, threads_per_replica=1)
    before = _running_children()
    with Runtime("ray", num_cpus=2) as runtime:
        engine = Engine(runtime, settings)
        engine.children_before = before
        yield engine


def _running_children() -> set[psutil.Process]:
    """Processes below this one that have not ended; other tests of this process may have some of their own."""
    return {child for child in psutil.Process().children(recursive=True) if _is_running(child)}


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _logprobs(actor: Actor, output: TokenOutput, temperature: float = 1.0) -> torch.Tensor:
    """What the trainer's network says about the sampled tokens, ``[T]``."""
    packed = pack([PROMPT], [output.token_ids], [[1] * len(output.token_ids)], share_prompts=False)
    with torch.no_grad():
        return actor(packed, temperature).logprobs[0]


def _assert_close(engine_logprobs: list[float], trainer_logprobs: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(engine_logprobs), trainer_logprobs, atol=1e-3, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_and_trainer_give_the_same_logprobs(engine, temperature) -> None:  # O27
    output = engine.generate(temperature=temperature, seed=5)

    assert len(output.token_ids) == 24
    assert output.stop_reason == "length"
    _assert_close(output.logprobs, _logprobs(engine.actor, output, temperature))


def test_a_seed_gives_the_same_tokens_again(engine) -> None:
    first, again, other = (engine.generate(seed=seed) for seed in (3, 3, 4))

    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


def test_an_update_changes_what_is_sampled_and_no_cache_survives_it(engine) -> None:  # contracts A12
    version = engine.module.policy_version
    before = engine.generate(temperature=0.0)
    assert before.policy_versions == [version] * 24

    engine.change_weights(seed=1)
    after = engine.generate(temperature=0.0)
    sampled = engine.generate(seed=6)

    assert after.policy_versions == [version + 1] * 24
    assert after.token_ids != before.token_ids
    assert engine.servers.weights_changed
    # The whole prompt was in the prefix cache: stale keys and values would show in every one of these.
    _assert_close(sampled.logprobs, _logprobs(engine.actor, sampled))


def test_given_tokens_are_scored_as_the_trainer_scores_them_also_where_they_are_cached(engine) -> None:
    sampled = engine.generate(seed=8)

    first, again = (engine.score(PROMPT, sampled.token_ids, top_k=30) for _ in range(2))

    expected = _logprobs(engine.actor, sampled)
    for output in (first, again):
        _assert_close(output.logprobs, expected)
        assert output.policy_version == engine.module.policy_version
    assert first.logprobs == pytest.approx(sampled.logprobs, abs=1e-3)
    with torch.no_grad():
        logits = engine.actor.network(torch.tensor([PROMPT + sampled.token_ids])).logits[0, len(PROMPT) - 1 : -1]
    best = logits.log_softmax(-1).topk(30)
    torch.testing.assert_close(torch.tensor(first.top_logprobs), best.values, atol=1e-3, rtol=0)
    assert [ids[0] for ids in first.top_ids] == best.indices[:, 0].tolist()


def test_a_sequence_is_scored_up_to_the_engines_length(engine) -> None:
    assert len(engine.score([5], [6] * (MAX_MODEL_LEN - 2)).logprobs) == MAX_MODEL_LEN - 2
    with pytest.raises(ValueError, match=r"1 \+ 2047 tokens, but the engine takes 2047"):
        engine.score([5], [6] * (MAX_MODEL_LEN - 1))


# The fault that vLLM 0.32 had on CPUs: after an update it went on multiplying with the head of an earlier one.
def test_an_engine_that_kept_an_old_head_fails_the_probe(engine) -> None:
    head = engine.actor.network.get_output_embeddings().weight
    with torch.no_grad():
        old = head.clone()
        head += 0.2 * torch.randn(head.shape, generator=torch.Generator().manual_seed(2))
        new = head.clone()

    def logprobs_under_the_new_head(sequences: list[list[int]]) -> list[list[float]]:
        with torch.no_grad():
            head.copy_(new)
            try:
                return engine.sequence_logprobs(sequences)
            finally:
                head.copy_(old)

    with torch.no_grad():
        head.copy_(old)
    engine.module.sequence_logprobs = logprobs_under_the_new_head
    try:
        with pytest.raises(WeightSyncProbeFailed, match=r"mean gap between trainer and engine over \d+ tokens"):
            engine.change_weights(seed=3)
    finally:
        engine.module.sequence_logprobs = engine.sequence_logprobs
    engine.change_weights(seed=4)


def test_a_request_in_flight_goes_on_under_the_new_weights(engine) -> None:  # D11
    # On a loaded machine the first tries may miss the time between its first token and its last.
    for seed, delay_s in enumerate((0.3, 0.6, 1.2, 0.15, 2.4)):
        running = engine.runtime.loop.submit(engine.request(max_tokens=1500, seed=9))
        time.sleep(delay_s)
        old_actor = copy.deepcopy(engine.actor)
        engine.change_weights(seed=100 + seed)
        output: TokenOutput = running.result(120)
        if len(set(output.policy_versions)) == 2:
            break

    version, versions = engine.module.policy_version, output.policy_versions
    assert versions == sorted(versions)
    assert set(versions) == {version - 1, version}
    assert len(output.token_ids) == len(versions) == 1500
    num_old = versions.count(version - 1)
    _assert_close(output.logprobs[:num_old], _logprobs(old_actor, output)[:num_old])
    # Recomputed under the new weights from the first token on, as the trainer sees the sequence.
    _assert_close(output.logprobs[num_old:], _logprobs(engine.actor, output)[num_old:])


def test_a_prompt_longer_than_the_model_is_refused_with_the_option(engine) -> None:
    with pytest.raises(ValueError, match=r"2048 tokens, but data\.serving\.max_model_len=2048"):
        engine.generate([5] * MAX_MODEL_LEN)

    assert len(engine.generate([5] * (MAX_MODEL_LEN - 3)).token_ids) == 3  # as much as there is room for


def test_an_aborted_request_returns_what_it_has(engine) -> None:
    async def start_and_abort() -> TokenOutput:
        running = asyncio.create_task(engine.request(request_id="to-abort", max_tokens=1900))
        await asyncio.sleep(0.5)
        await engine.replica.call("abort", "to-abort", timeout_s=30)
        await engine.replica.call("abort", "never-heard-of", timeout_s=30)
        return await running

    output = engine.run(start_and_abort())

    assert output.stop_reason == "abort"
    assert len(output.token_ids) == len(output.logprobs) == len(output.policy_versions) < 1900
    assert len(engine.generate().token_ids) == 24


def test_many_requests_at_once_keep_their_own_answers(engine) -> None:
    async def all_at_once() -> list[TokenOutput]:
        return list(await asyncio.gather(*(engine.request(seed=seed, max_tokens=8 + seed) for seed in range(16))))

    outputs = engine.run(all_at_once())

    assert [len(output.token_ids) for output in outputs] == [8 + seed for seed in range(16)]
    for output in outputs:
        _assert_close(output.logprobs, _logprobs(engine.actor, output))


def test_stopping_leaves_no_process(engine) -> None:  # the last one that uses the engine
    (health,) = engine.run(engine.servers.health())
    assert health["version"] == engine.module.policy_version
    pids = health["engine_pids"]
    assert pids

    engine.run(engine.servers.stop())
    engine.runtime.stop()

    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert _running_children() - engine.children_before == set()


def test_a_fit_over_ray_and_vllm_learns_from_the_policy_it_trains(lit_rl, tmp_path) -> None:
    recipe = write_recipe(
        tmp_path,
        data__init_args__backend="ray",
        data__init_args__num_cpus=2,
        data__init_args__serving={"dtype": "float32", "kv_cache_gib": 0.25, "threads_per_replica": 1},
    )

    run = lit_rl("fit", "--config", recipe)

    assert run.wait(540) == 0, run.stderr
    assert run.left_over(5.0) == []
    folder = the_run_folder(tmp_path)
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["iteration"] for row in rows[:2]] == ["0.0", "1.0"]
    assert max(float(row["rollout_corr/logprob_gap_max"]) for row in rows[:2]) < 1e-3
    assert [bool(row["val-core/arithmetic/reward/mean@1"]) for row in rows] == [False, True, True]
    lines = [json.loads(line) for line in (folder / "trajectories/iteration_00001.jsonl").read_text().splitlines()]
    assert {(line["policy_version_min"], line["policy_version_max"]) for line in lines} == {(1, 1)}
