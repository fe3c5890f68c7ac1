from __future__ import annotations

import asyncio
import json

import pytest
from agent_fakes import END, EchoClient, FixedClient, LetterTemplate, LetterTokenizer, answer, request

from lit_rl.agents import InfrastructureError, SingleTurnAgentLoop
from lit_rl.agents.policy_text import end_token_ids
from lit_rl.agents.response import finish_response
from lit_rl.types import SamplingParams, TokenOutput, Trajectory

ENDS = frozenset({2, 7})


def run_loop(client: object, max_response_tokens: int = 8, text: str = "abc", **sampling: object) -> Trajectory:
    loop = SingleTurnAgentLoop(
        client=client,  # type: ignore[arg-type]
        chat_template=LetterTemplate(),
        tokenizer=LetterTokenizer(),
        max_response_tokens=max_response_tokens,
        end_token_ids=ENDS,
        appended_end_token_id=END,
    )
    return asyncio.run(loop.run(request(text).prompt, SamplingParams(**sampling)))  # type: ignore[arg-type]


def test_stop_string_gets_an_end_token_that_is_not_trained_on() -> None:  # O14
    response = finish_response(answer([5, 6]), end_token_ids=ENDS, max_tokens=8, appended_end_token_id=2)
    assert response.token_ids == [5, 6, 2]
    assert response.loss_mask == [1, 1, 0]
    assert response.logprobs == [-0.5, -0.5, 0.0]
    assert response.policy_versions == [3, 3, -1]
    assert response.stop_reason == "stop"


def test_no_end_token_is_added_beyond_the_limit() -> None:
    response = finish_response(answer([5, 6]), end_token_ids=ENDS, max_tokens=2, appended_end_token_id=2)
    assert response.token_ids == [5, 6]


@pytest.mark.parametrize(
    ("token_ids", "limit", "said", "stop_reason", "mask"),
    [  # O15: what the engine says at the limit does not decide, the end token does.
        ([5, 6, 7], 3, "length", "stop", [1, 1, 1]),
        ([5, 6, 2], 3, "stop", "stop", [1, 1, 1]),
        ([5, 6, 9], 3, "length", "length", [1, 1, 1]),
        ([5, 2, 9, 9], 4, "length", "stop", [1, 1, 0, 0]),
    ],
)
def test_any_end_token_completes_a_response(
    token_ids: list[int], limit: int, said: str, stop_reason: str, mask: list[int]
) -> None:
    response = finish_response(answer(token_ids, said), end_token_ids=ENDS, max_tokens=limit)
    assert (response.stop_reason, response.loss_mask) == (stop_reason, mask)
    assert response.token_ids == token_ids
    assert [logprob == 0.0 for logprob in response.logprobs] == [not sampled for sampled in mask]


def test_ignored_end_tokens_are_ordinary_tokens() -> None:
    response = finish_response(answer([5, 2, 9], "length"), end_token_ids=ENDS, max_tokens=3, ignore_eos=True)
    assert response.loss_mask == [1, 1, 1]
    assert response.stop_reason == "length"


def test_tokens_beyond_the_limit_are_cut_in_all_lists() -> None:
    response = finish_response(answer([5, 6, 8, 9]), end_token_ids=ENDS, max_tokens=3)
    assert response.token_ids == [5, 6, 8]
    assert len(response.loss_mask) == len(response.logprobs) == len(response.policy_versions) == 3
    assert response.stop_reason == "length"


def test_lists_of_unequal_length_from_the_engine_are_refused() -> None:
    output = TokenOutput(token_ids=[5, 6], logprobs=[-1.0], stop_reason="stop", policy_versions=[0, 0])
    with pytest.raises(ValueError, match="2 ids, 1 log-probs"):
        finish_response(output, end_token_ids=ENDS, max_tokens=3)


def test_empty_response_gives_empty_lists() -> None:  # O16
    trajectory = run_loop(FixedClient(answer([])))
    trajectory.check()
    assert (trajectory.response_ids, trajectory.loss_mask) == ([], [])
    assert trajectory.num_loss_tokens == 0


def test_single_turn_samples_once_and_keeps_the_ids() -> None:
    client = EchoClient()
    trajectory = run_loop(client)
    assert trajectory.prompt_ids == [10, 11, 12]
    assert trajectory.response_ids == [10, 11, 12, END]
    assert trajectory.num_turns == 2
    assert trajectory.metrics["generate_s"] >= 0
    assert len(client.calls) == 1


def test_smaller_of_the_two_token_limits_is_asked_for() -> None:
    client = EchoClient()
    run_loop(client, max_response_tokens=5, max_tokens=9)
    run_loop(client, max_response_tokens=9, max_tokens=4)
    assert [sampling.max_tokens for _, sampling, _ in client.calls] == [5, 4]


def test_end_token_is_added_only_where_stop_strings_are_set() -> None:
    client = FixedClient(answer([12, 13]))
    assert run_loop(client).response_ids == [12, 13]
    assert run_loop(client, stop=["d"]).response_ids == [12, 13, END]


def test_stop_token_ids_of_the_sampling_end_a_response_too() -> None:
    assert run_loop(FixedClient(answer([12, 13], "length")), stop_token_ids=[13]).stop_reason == "stop"


def test_no_replica_is_an_infrastructure_error_and_a_long_prompt_is_not() -> None:
    with pytest.raises(InfrastructureError, match="all replicas are gone"):
        run_loop(EchoClient(fail=lambda ids: ConnectionError("all replicas are gone")))
    with pytest.raises(ValueError, match="too long"):
        run_loop(EchoClient(fail=lambda ids: ValueError("prompt too long")))


def test_end_tokens_come_from_tokenizer_and_generation_config(tmp_path) -> None:
    config = tmp_path / "generation_config.json"
    assert end_token_ids(2, config) == {2}
    config.write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert end_token_ids(2, config) == {2, 7}
    config.write_text(json.dumps({"eos_token_id": 9}))
    assert end_token_ids(None, config) == {9}
