"""Agents of the openai client: exact ids over turns, and a sequence of its own for every history that differs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lit_rl.agents import AgentSettings
from lit_rl.agents.agent_loop import InfrastructureError
from lit_rl.agents.openai_agent import OpenAIAgentLoop
from lit_rl.agents.openai_session import OpenAISession, RequestRefused
from lit_rl.agents.policy_text import PolicyText
from lit_rl.agents.settings import TrajectoryRequest
from lit_rl.agents.worker import AgentLoopWorker
from lit_rl.data.chat_template import ChatTemplate, ChatTemplateError
from lit_rl.models.loading import load_tokenizer
from lit_rl.types import Prompt, SamplingParams, TokenOutput, Trajectory

EXAMPLES = Path(__file__).parents[3] / "examples"
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 40}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("bundled/tiny-random")


class Scripted:
    """Answers with given texts; an exception is raised."""

    def __init__(self, tokenizer: Any, *answers: str | Exception) -> None:
        self.tokenizer, self.answers = tokenizer, list(answers)
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingParams] = []

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        answer = self.answers.pop(0)
        await asyncio.sleep(0)
        if isinstance(answer, Exception):
            raise answer
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = ids[: sampling.max_tokens]
        return TokenOutput(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            stop_reason="stop" if ids[-1] == self.tokenizer.eos_token_id else "length",
            policy_versions=[7] * len(ids),
        )


def build_loop(tokenizer: Any, client: Any, agent: str = f"{__name__}.two_turns", limit: int = 200) -> OpenAIAgentLoop:
    template = ChatTemplate(tokenizer, custom_template=str(EXAMPLES / "chatml_tools.jinja"))
    return OpenAIAgentLoop(
        agent=agent,
        client=client,
        chat_template=template,
        tokenizer=tokenizer,
        max_response_tokens=limit,
        end_token_ids=frozenset({tokenizer.eos_token_id}),
    )


def open_session(tokenizer: Any, *answers: str, limit: int = 200) -> tuple[OpenAISession, Scripted]:
    client = Scripted(tokenizer, *answers)
    loop = build_loop(tokenizer, client, limit=limit)
    return OpenAISession(loop, loop.parser, SamplingParams(max_tokens=limit, seed=3)), client


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(session: OpenAISession, *messages: dict[str, Any], **request: Any) -> dict[str, Any]:
    return asyncio.run(session.complete({"messages": list(messages), **request}))


def test_a_history_that_goes_on_keeps_its_ids(tokenizer: Any) -> None:
    session, client = open_session(tokenizer, CALL, "It is 42.")
    first = ask(session, user("40 + 2?"), tools=TOOLS)["choices"][0]
    assert first["finish_reason"] == "tool_calls"
    (call,) = first["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 40, "b": 2}

    # The client sends the turn back in its own words: empty fields dropped, arguments in another order.
    call["function"]["arguments"] = '{"a": 40, "b": 2}'
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    tool = {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "42"}]}
    second = ask(session, user("40 + 2?"), answer, tool, tools=TOOLS)

    (sequence,) = session.sequences
    assert second["choices"][0]["message"]["content"] == "It is 42."
    assert (
        client.prompts[1]
        == sequence.prompt_ids + sequence.response.token_ids[: -len(client.tokenizer("It is 42.<|im_end|>").input_ids)]
    )
    sampled = [i for i, mask in zip(sequence.response.token_ids, sequence.response.loss_mask, strict=True) if mask]
    assert tokenizer.decode(sampled) == f"{CALL}<|im_end|>It is 42.<|im_end|>"
    given = [i for i, mask in zip(sequence.response.token_ids, sequence.response.loss_mask, strict=True) if not mask]
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(given)
    assert client.samplings[0].seed != client.samplings[1].seed
    assert second["usage"]["total_tokens"] == len(sequence.prompt_ids) + len(sequence.response.token_ids)


def test_an_edited_history_begins_a_sequence_of_its_own(tokenizer: Any) -> None:
    session, client = open_session(tokenizer, "one", "two")
    ask(session, user("Q"))
    ask(session, user("Q"), {"role": "assistant", "content": "ONE"}, user("and?"))

    first, second = session.sequences
    assert sum(first.response.loss_mask) == sum(second.response.loss_mask) == 2
    assert "ONE<|im_end|>" in tokenizer.decode(second.prompt_ids)
    assert tokenizer.decode(second.response.token_ids) == "two<|im_end|>"


def test_a_fork_takes_what_comes_before_it_as_its_prompt(tokenizer: Any) -> None:
    session, client = open_session(tokenizer, "one", "two", "three")
    one = {"role": "assistant", "content": "one"}
    ask(session, user("Q"))
    ask(session, user("Q"), one, user("left?"))
    ask(session, user("Q"), one, user("right?"))

    left, right = session.sequences
    assert right.prompt_ids[: len(left.prompt_ids) + 2] == left.prompt_ids + left.response.token_ids[:2]
    assert tokenizer.decode(right.response.token_ids) == "three<|im_end|>"
    assert left.response.loss_mask.count(1) == 4
    assert right.response.loss_mask == [1, 1]


def test_requests_at_once_never_write_into_one_sequence(tokenizer: Any) -> None:
    session, client = open_session(tokenizer, "one", "two", "three")
    history = [user("Q"), {"role": "assistant", "content": "one"}, user("again?")]

    async def main() -> None:
        await session.complete({"messages": history[:1]})
        await asyncio.gather(*(session.complete({"messages": history}) for _ in range(2)))

    asyncio.run(main())
    assert [sum(sequence.response.loss_mask) for sequence in session.sequences] == [4, 2]
    assert len({sampling.seed for sampling in client.samplings}) == 3


def test_other_tools_are_another_conversation(tokenizer: Any) -> None:
    session, _ = open_session(tokenizer, "one", "two")
    ask(session, user("Q"), tools=TOOLS)
    ask(session, user("Q"), {"role": "assistant", "content": "one"}, user("and?"))
    assert len(session.sequences) == 2


def test_limits_are_the_runs_and_sampling_is_not_the_clients(tokenizer: Any) -> None:
    session, client = open_session(tokenizer, "one two three four", "x", limit=6)
    first = ask(session, user("Q"), max_tokens=2, temperature=0.0, stop="END")
    assert first["choices"][0]["finish_reason"] == "length"
    assert client.samplings[0].temperature == 1.0
    assert client.samplings[0].stop == ["END"]
    with pytest.raises(RequestRefused, match="used its 6 tokens"):
        ask(session, user("Q"), {"role": "assistant", "content": first["choices"][0]["message"]["content"]}, user("?"))
    assert session.is_exhausted


@pytest.mark.parametrize(
    ("request_body", "message"),
    [
        ({"messages": []}, "at least one"),
        ({"messages": [{"content": "x"}]}, "has no role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "media"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n=2"),
    ],
)
def test_requests_that_cannot_be_answered_say_why(request_body: dict, message: str, tokenizer: Any) -> None:
    session, _ = open_session(tokenizer)
    with pytest.raises(RequestRefused, match=message):
        asyncio.run(session.complete(request_body))


async def two_turns(prompt: Prompt, base_url: str, api_key: str, model: str) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        first = await client.chat.completions.create(model=model, messages=[user("Q")])
        stream = await client.chat.completions.create(
            model=model,
            messages=[user("Q"), {"role": "assistant", "content": first.choices[0].message.content}, user("?")],
            stream=True,
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    return float(len(text))


def sync_agent(prompt: Prompt, base_url: str, api_key: str, model: str) -> None:
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as client:
        client.chat.completions.create(model=model, messages=[user("other")])
        client.chat.completions.create(model=model, messages=prompt.messages)


def until_it_fails(prompt: Prompt, base_url: str, api_key: str, model: str) -> None:
    from openai import OpenAI

    messages = list(prompt.messages)
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        while True:
            reply = client.chat.completions.create(model=model, messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, user("again")]


def roll_out(tokenizer: Any, agent: str, *answers: str | Exception, limit: int = 200) -> Trajectory:
    pytest.importorskip("openai")
    loop = build_loop(tokenizer, None)
    text = PolicyText(
        tokenizer=tokenizer, chat_template=loop.chat_template, end_token_ids=frozenset({tokenizer.eos_token_id})
    )
    settings = AgentSettings(default_agent_loop="openai_agent", default_options={"agent": agent})
    worker = AgentLoopWorker(settings, Scripted(tokenizer, *answers), text)
    prompt = Prompt(row_id="r", messages=[user("Q")], data_source="d")
    request = TrajectoryRequest(prompt=prompt, group_id="g", sample_index=2)
    return asyncio.run(worker.roll_out(request, SamplingParams(max_tokens=limit)))


def test_an_agent_of_the_openai_client_becomes_one_trajectory(tokenizer: Any) -> None:
    trajectory = roll_out(tokenizer, f"{__name__}.two_turns", "first", "second")
    assert trajectory.error is None
    assert trajectory.reward == len("second")
    assert trajectory.text == "firstsecond"
    assert trajectory.num_turns == 4
    assert trajectory.branches == []
    assert set(trajectory.policy_versions) == {7, -1}


def test_a_second_conversation_is_a_branch_with_the_same_identity(tokenizer: Any) -> None:
    trajectory = roll_out(tokenizer, f"{__name__}.sync_agent", "first", "second")
    assert trajectory.text == "second"
    (branch,) = trajectory.branches
    assert tokenizer.decode(branch.response_ids) == "first<|im_end|>"
    assert (branch.row_id, branch.group_id, branch.sample_index, branch.reward) == ("r", "g", 2, trajectory.reward)


def test_running_out_of_tokens_ends_the_conversation_and_loses_nothing(tokenizer: Any) -> None:
    trajectory = roll_out(tokenizer, f"{__name__}.until_it_fails", *["one"] * 9, limit=40)
    assert trajectory.error is None
    assert trajectory.is_truncated
    assert trajectory.metrics["ended_by_max_tokens"] == 1
    assert trajectory.num_loss_tokens >= 4


def test_a_replica_that_is_gone_is_no_fault_of_the_agent(tokenizer: Any) -> None:
    trajectory = roll_out(tokenizer, f"{__name__}.sync_agent", "first", ConnectionError("replica gone"))
    assert trajectory.error is not None
    assert trajectory.error.startswith("infrastructure: row r: generate failed with ConnectionError: replica gone")
    assert InfrastructureError.__name__ not in trajectory.error


def fails(prompt: Prompt, **kwargs: Any) -> None:
    raise ZeroDivisionError("mine")


def does_nothing(prompt: Prompt, **kwargs: Any) -> None:
    pass


@pytest.mark.parametrize(("agent", "message"), [(fails, "ZeroDivisionError: mine"), (does_nothing, "for nothing")])
def test_faults_of_the_agent_fail_its_trajectory(agent: Any, message: str, tokenizer: Any) -> None:
    trajectory = roll_out(tokenizer, f"{__name__}.{agent.__name__}")
    assert message in (trajectory.error or "")


def test_the_example_agent_calls_its_tool(tokenizer: Any) -> None:
    trajectory = roll_out(tokenizer, f"{EXAMPLES}/openai_agent.py:agent", CALL, "It is 42.")
    assert trajectory.error is None
    assert trajectory.text == f"{CALL}It is 42."
    assert trajectory.messages[1]["content"] == "42"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "type", "text", "function", "name", "id"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def some(**fields: Any) -> Any:
    """A mapping with any of these keys."""
    return st.fixed_dictionaries({}, optional=fields)


calls = st.lists(some(id=plain, function=some(name=plain, arguments=plain) | plain), max_size=2)
messages = some(
    role=st.sampled_from(["user", "assistant", "tool", "system"]) | plain,
    content=plain,
    tool_calls=calls | plain,
    tool_call_id=plain,
)
bodies = some(
    messages=st.lists(messages | plain, max_size=3) | plain,
    tools=st.just(TOOLS) | plain,
    max_tokens=plain,
    stop=plain,
    n=st.just(1) | plain,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(bodies, min_size=1, max_size=2))
def test_no_request_makes_anything_but_a_refusal(tokenizer: Any, requests: list[dict[str, Any]]) -> None:
    loop = build_loop(tokenizer, Scripted(tokenizer, "a", "b"))
    session = OpenAISession(loop, loop.parser, SamplingParams(max_tokens=50))

    async def ask() -> None:
        for body in requests:
            with contextlib.suppress(RequestRefused, ChatTemplateError):
                await session.complete(body)

    asyncio.run(ask())
    for sequence in session.sequences:
        assert len(sequence.response.token_ids) == len(sequence.response.logprobs)


def test_an_agent_that_is_not_there_is_named(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="agent='/no/agent.py:agent' cannot be imported: there is no file"):
        build_loop(tokenizer, None, agent="/no/agent.py:agent")
