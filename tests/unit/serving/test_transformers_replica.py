"""The transformers replica against the model's own forward pass and generation, on the random bundled model."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lit_rl.models import Actor, load_causal_lm, load_tokenizer, resolve_model
from lit_rl.models.packing import pack
from lit_rl.serving.settings import ServingSettings
from lit_rl.serving.transformers_replica import TransformersReplica
from lit_rl.types import SamplingParams, ScoreOutput, TokenOutput

MODEL = "bundled/tiny-random"
PROMPT = [11, 2000, 345, 7, 40000]
OTHERS = [[5], [9, 8, 7, 6, 5, 4, 3, 21, 31], [1234, 77]]


@cache
def model() -> Any:
    return load_causal_lm(MODEL)


@cache
def tokenizer() -> Any:
    return load_tokenizer(MODEL)


@pytest.fixture(autouse=True)
def _load_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica gets a copy of what was read from disk once."""
    monkeypatch.setattr("lit_rl.models.load_causal_lm", lambda name, dtype: copy.deepcopy(model()).to(dtype))
    monkeypatch.setattr("lit_rl.models.load_tokenizer", lambda name: tokenizer())


def serve(use: Callable[[TransformersReplica], Awaitable[Any]], *, max_model_len: int = 64, **settings: Any) -> Any:
    """Run ``use`` with a started float32 replica."""

    async def run() -> Any:
        replica = TransformersReplica(
            resolve_model(MODEL), ServingSettings(dtype="float32", **settings), max_model_len, rank=0, gpu=False
        )
        await replica.start()
        try:
            return await asyncio.wait_for(use(replica), 60)
        finally:
            await replica.close()

    return asyncio.run(run())


def sample(*requests: tuple[list[int], SamplingParams], **settings: Any) -> list[TokenOutput]:
    """Send requests at once."""

    async def use(replica: TransformersReplica) -> list[TokenOutput]:
        calls = [replica.generate(ids, sampling, str(number)) for number, (ids, sampling) in enumerate(requests)]
        return await asyncio.gather(*calls)

    return serve(use, **settings)


def greedy(max_tokens: int = 8, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


@cache
def greedy_ids() -> list[int]:
    """What transformers itself generates."""
    ids = torch.tensor([PROMPT])
    return model().generate(ids, do_sample=False, max_new_tokens=8)[0, len(PROMPT) :].tolist()


def forward_logprobs(prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """``[T, V]`` of one plain forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model()(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def test_greedy_equals_the_generation_of_transformers() -> None:
    (output,) = sample((PROMPT, greedy()))

    assert output.token_ids == greedy_ids()
    assert output.stop_reason == "length"
    assert output.policy_versions == [-1] * 8


def test_greedy_does_not_depend_on_padding() -> None:
    outputs = sample((PROMPT, greedy()), *((ids, greedy(3)) for ids in OTHERS))

    assert outputs[0].token_ids == greedy_ids()
    assert [len(output.token_ids) for output in outputs] == [8, 3, 3, 3]


# O27: the engine's log-probs are those the trainer computes at the same temperature.
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_equal_a_forward_pass_and_the_trainers_at_the_same_temperature(temperature: float) -> None:
    outputs = sample(
        *((ids, SamplingParams(temperature=temperature, max_tokens=12, seed=3)) for ids in [PROMPT, *OTHERS])
    )

    for prompt, output in zip([PROMPT, *OTHERS], outputs, strict=True):
        table = forward_logprobs(prompt, output.token_ids, temperature)
        expected = table[torch.arange(len(output.token_ids)), torch.tensor(output.token_ids)]
        torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=1e-4, rtol=0)
        packed = pack([prompt], [output.token_ids], [[1] * len(output.token_ids)], share_prompts=False)
        trainers = Actor(model())(packed, temperature).logprobs[0]
        torch.testing.assert_close(torch.tensor(output.logprobs), trainers, atol=1e-4, rtol=0)


def score(prompt: list[int], response: list[int], **options: Any) -> ScoreOutput:
    return serve(lambda replica: replica.score(prompt, response, "s", **options))


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_given_tokens_are_scored_as_a_forward_pass_scores_them(temperature: float) -> None:
    response = [9, 800, 3, 44]

    output = score(PROMPT, response, temperature=temperature, top_k=3)

    table = forward_logprobs(PROMPT, response, temperature)
    torch.testing.assert_close(torch.tensor(output.logprobs), table[torch.arange(4), response], atol=1e-5, rtol=0)
    best = table.topk(3)
    assert output.top_ids == best.indices.tolist()
    torch.testing.assert_close(torch.tensor(output.top_logprobs), best.values, atol=1e-5, rtol=0)
    assert output.policy_version == -1


def test_scoring_nothing_gives_nothing_and_candidates_come_only_when_asked_for() -> None:
    assert score(PROMPT, []) == ScoreOutput(logprobs=[], policy_version=-1)
    assert score(PROMPT, [5]).top_ids == []


@pytest.mark.parametrize(
    ("prompt", "response", "options", "words"),
    [
        ([], [5], {}, "prompt of at least one token"),
        (PROMPT, [5] * 60, {}, r"5 \+ 60 tokens, but the engine takes 64. Raise max_model_len"),
        (PROMPT, [5], {"temperature": 0.0}, r"temperature=0.0\): must be above 0"),
        (PROMPT, [5], {"top_k": -1}, r"top_k=-1\): must be at least 0"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    prompt: list[int], response: list[int], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        score(prompt, response, **options)


def test_nothing_is_scored_while_paused_and_pausing_waits_for_what_is() -> None:
    async def use(replica: TransformersReplica) -> None:
        running = asyncio.create_task(replica.score(PROMPT, [7] * 50, "early"))
        await wait_until(lambda: replica._num_scoring == 1)
        await replica.pause()
        assert replica._num_scoring == 0
        late = asyncio.create_task(replica.score(PROMPT, [5], "late"))
        await asyncio.sleep(0.05)
        assert not late.done()
        await replica.resume()
        assert [len((await call).logprobs) for call in (running, late)] == [50, 1]

    serve(use)


# O27, in its own numbers: logits [2, 0] at temperature 0.5 give -0.01815, and -0.12693 unscaled.
def test_logprobs_are_those_after_temperature() -> None:
    async def use(replica: TransformersReplica) -> TokenOutput:
        class TwoTokens(torch.nn.Module):
            device = torch.device("cpu")

            def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
                logits = torch.tensor([2.0, 0.0]).expand(*input_ids.shape, 2)
                return type("Output", (), {"logits": logits, "past_key_values": None})

        replica.model = TwoTokens()
        return await replica.generate([0], SamplingParams(temperature=0.5, max_tokens=20, seed=0, ignore_eos=True), "r")

    output = serve(use)

    by_token = {0: -0.01815, 1: -4.01815}
    assert output.logprobs == pytest.approx([by_token[token] for token in output.token_ids], abs=1e-4)


def test_what_a_seed_samples_does_not_depend_on_who_shares_the_batch() -> None:
    mine = SamplingParams(max_tokens=10, seed=5)
    neighbours = [(ids, SamplingParams(max_tokens=14, seed=seed)) for seed, ids in enumerate(OTHERS)]

    (alone,) = sample((PROMPT, mine))
    first, *_ = sample((PROMPT, mine), *neighbours)
    *_, last = sample(*neighbours, (PROMPT, mine))
    (other_seed,) = sample((PROMPT, SamplingParams(max_tokens=10, seed=6)))

    assert alone.token_ids == first.token_ids == last.token_ids
    assert other_seed.token_ids != alone.token_ids
    assert alone.logprobs == pytest.approx(last.logprobs, abs=1e-4)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}])
def test_one_candidate_is_the_greedy_one_with_log_prob_0(narrow: dict[str, Any]) -> None:
    (output,) = sample((PROMPT, SamplingParams(max_tokens=8, seed=1, **narrow)))

    assert output.token_ids == greedy_ids()
    assert output.logprobs == [0.0] * 8


def test_top_k_keeps_k_candidates_and_gives_their_renormalised_log_probs() -> None:
    (output,) = sample((PROMPT, SamplingParams(max_tokens=30, seed=1, top_k=3, ignore_eos=True)))

    table = forward_logprobs(PROMPT, output.token_ids, 1.0)
    best = table.topk(3)
    for position, token in enumerate(output.token_ids):
        assert token in best.indices[position]
        among_three = (table[position, token] - best.values[position].logsumexp(0)).item()
        assert output.logprobs[position] == pytest.approx(among_three, abs=1e-4)
    assert len({int((best.indices[i] == t).nonzero()) for i, t in enumerate(output.token_ids)}) == 3


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    (output,) = sample((PROMPT, SamplingParams(temperature=0.2, max_tokens=30, seed=1, top_p=0.5, ignore_eos=True)))

    table = forward_logprobs(PROMPT, output.token_ids, 0.2)
    for position, token in enumerate(output.token_ids):
        ordered, order = table[position].exp().sort(descending=True)
        kept = int((ordered.cumsum(0) < 0.5).sum()) + 1
        assert token in order[:kept]
        expected = (table[position, token] - ordered[:kept].sum().log()).item()
        assert output.logprobs[position] == pytest.approx(expected, abs=1e-4)


def test_a_repetition_penalty_divides_seen_logits() -> None:
    (output,) = sample((PROMPT, greedy(6, repetition_penalty=3.0)))

    expected = model().generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=6, repetition_penalty=3.0)
    assert output.token_ids == expected[0, len(PROMPT) :].tolist()


def test_stop_ids_stop_strings_and_end_tokens_end_a_response_and_are_kept() -> None:
    ids = greedy_ids()
    text = tokenizer().decode([ids[4]])
    first = ids.index(ids[4])

    async def use(replica: TransformersReplica) -> list[TokenOutput]:
        by_id, by_text = await asyncio.gather(
            replica.generate(PROMPT, greedy(stop_token_ids=[ids[4]]), "id"),
            replica.generate(PROMPT, greedy(stop=[text]), "text"),
        )
        replica.end_ids = {ids[4]}
        by_end, ignored, by_both = await asyncio.gather(
            replica.generate(PROMPT, greedy(), "end"),
            replica.generate(PROMPT, greedy(ignore_eos=True), "ignored"),
            replica.generate(PROMPT, greedy(ignore_eos=True, stop_token_ids=[ids[4]]), "both"),
        )
        return [by_id, by_text, by_end, by_both, ignored]

    *stopped, ignored = serve(use)

    for output in stopped:
        assert output.stop_reason == "stop"
    assert stopped[0].token_ids == stopped[2].token_ids == stopped[3].token_ids == ids[: first + 1]
    assert len(stopped[1].token_ids) <= first + 1
    assert text in tokenizer().decode(stopped[1].token_ids)
    assert (ignored.token_ids, ignored.stop_reason) == (ids, "length")


def test_a_response_ends_at_the_models_longest_sequence() -> None:
    (output,) = sample((PROMPT, greedy(100, ignore_eos=True)), max_model_len=8)

    assert (len(output.token_ids), output.stop_reason) == (3, "length")


def test_a_prompt_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt has 5 tokens, but data.serving.max_model_len=5 leaves no room"):
        sample((PROMPT, greedy()), max_model_len=5)


def test_a_failing_batch_fails_its_own_requests_only() -> None:
    async def use(replica: TransformersReplica) -> TokenOutput:
        with pytest.raises(IndexError):
            await replica.generate([10**7], greedy(), "bad")
        return await replica.generate(PROMPT, greedy(), "good")

    assert serve(use).token_ids == greedy_ids()


async def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def test_aborting_ends_a_running_request_with_what_it_has_and_a_waiting_one_with_nothing() -> None:
    async def use(replica: TransformersReplica) -> None:
        long = greedy(4000, ignore_eos=True)
        running = asyncio.create_task(replica.generate(PROMPT, long, "running"))
        await wait_until(lambda: "running" in replica._running)
        waiting = asyncio.create_task(replica.generate(PROMPT, long, "waiting"))
        await asyncio.sleep(0)
        await replica.abort("waiting")
        await replica.abort("never heard of")

        nothing = await waiting
        assert (nothing.token_ids, nothing.stop_reason) == ([], "abort")
        assert not running.done()
        await replica.abort("running")
        some = await running
        assert some.stop_reason == "abort"
        assert len(some.token_ids) == len(some.logprobs) == len(some.policy_versions) < 4000

    serve(use, max_model_len=5000, max_num_seqs=1)


def test_a_caller_that_gives_up_takes_its_request_along() -> None:
    async def use(replica: TransformersReplica) -> None:
        call = asyncio.create_task(replica.generate(PROMPT, greedy(4000, ignore_eos=True), "r"))
        await wait_until(lambda: "r" in replica._running)
        call.cancel()
        await wait_until(lambda: not replica._running)

    serve(use, max_model_len=5000)


@pytest.mark.parametrize("turns", range(6))
def test_nothing_is_sampled_while_paused(turns: int) -> None:
    async def use(replica: TransformersReplica) -> None:
        # Paused in the moment between a request's arrival and its batch.
        early = asyncio.create_task(replica.generate(PROMPT, greedy(), "early"))
        for _ in range(turns):
            await asyncio.sleep(0)
        await replica.pause()
        late = asyncio.create_task(replica.generate(PROMPT, greedy(), "late"))
        await asyncio.sleep(0.05)
        assert replica._running == {}
        assert not early.done()
        assert not late.done()
        await replica.resume()
        assert [output.token_ids for output in await asyncio.gather(early, late)] == [greedy_ids()] * 2

    serve(use)


def test_pausing_waits_for_the_running_batch() -> None:
    async def use(replica: TransformersReplica) -> None:
        call = asyncio.create_task(replica.generate(PROMPT, greedy(), "r"))
        await wait_until(lambda: "r" in replica._running)
        await replica.pause()
        assert replica._running == {}
        assert (await call).token_ids == greedy_ids()

    serve(use)


async def push(replica: TransformersReplica, tensors: dict[str, torch.Tensor], version: int, path: Path) -> Any:
    await replica.pause()
    await replica.start_weight_update()
    names = list(tensors)
    for number, half in enumerate((names[:5], names[5:])):
        file = path / f"{number}.safetensors"
        save_file({name: tensors[name] for name in half}, file)
        await replica.update_weights({"path": str(file)})
    report = await replica.finish_weight_update(version)
    await replica.resume()
    return report


def test_a_weight_update_changes_what_is_sampled_and_stamps_its_version(tmp_path: Path) -> None:
    mine = {name: parameter.detach().clone() for name, parameter in model().named_parameters()}
    flipped = {name: tensor.flip(0).contiguous() for name, tensor in mine.items()}

    async def use(replica: TransformersReplica) -> None:
        before = await replica.generate(PROMPT, greedy(), "0")
        report = await push(replica, flipped, 7, tmp_path)
        changed = await replica.generate(PROMPT, greedy(), "1")
        back = await push(replica, mine, 8, tmp_path)
        restored = await replica.generate(PROMPT, greedy(), "2")

        assert report.version == 7
        assert report.bytes_received == {name: 4 * tensor.numel() for name, tensor in mine.items()}
        assert report.checksum != back.checksum
        assert changed.token_ids != before.token_ids
        assert changed.policy_versions == [7] * 8
        assert restored.token_ids == before.token_ids == greedy_ids()
        assert restored.policy_versions == [8] * 8
        assert await replica.health() == {"version": 8, "engine_pids": []}

    serve(use)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model.no_such.weight": torch.zeros(2)}, r"replica 0 has no parameter named 'model.no_such.weight'"),
        ({"model.norm.weight": torch.zeros(3)}, r"'model.norm.weight' has shape \(3,\), replica 0\s+expects \(64,\)"),
    ],
)
def test_weights_under_a_wrong_name_or_of_a_wrong_shape_are_refused(
    tensors: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    async def use(replica: TransformersReplica) -> None:
        with pytest.raises(ValueError, match=words):
            await push(replica, tensors, 1, tmp_path)

    serve(use)


def test_replicas_of_one_process_load_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_rl.models.load_causal_lm", load_causal_lm)  # really from disk

    async def use(first: TransformersReplica) -> list[TokenOutput]:
        others = [
            TransformersReplica(first.model_name, first.settings, 64, rank=rank, gpu=False) for rank in range(1, 4)
        ]
        await asyncio.gather(*(replica.start() for replica in others))
        try:
            return await asyncio.gather(*(replica.generate(PROMPT, greedy(), "r") for replica in others))
        finally:
            await asyncio.gather(*(replica.close() for replica in others))

    assert [output.token_ids for output in serve(use)] == [greedy_ids()] * 3


def test_a_replica_that_was_never_started_is_not_healthy() -> None:
    replica = TransformersReplica("-", ServingSettings(), 8, rank=2, gpu=False)

    with pytest.raises(RuntimeError, match="Replica 2: the batching loop has ended"):
        asyncio.run(replica.health())
