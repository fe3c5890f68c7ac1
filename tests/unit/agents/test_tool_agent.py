"""The tool loop: tokens and masks over turns, limits, and everything a policy can do wrong."""

import asyncio
import json
from pathlib import Path

import pytest

from lit_rl.agents import ToolAgentLoop
from lit_rl.agents.tool_messages import truncate_text
from lit_rl.data.chat_template import ChatTemplate
from lit_rl.models.loading import load_tokenizer
from lit_rl.rewards.result import ScoreRequest
from lit_rl.tools import BaseTool, FunctionTool, OpenAIFunctionToolSchema, ToolResponse
from lit_rl.types import Prompt, SamplingParams, TokenOutput

END = 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("bundled/tiny-random")


class CharTokenizer:
    """One id per character, 10 above its code point; 2 is the end token."""

    eos_token_id = END
    all_special_tokens = ["<e>"]

    def encode(self, text, add_special_tokens=False):
        return [ord(c) + 10 for c in text]

    def decode(self, ids, skip_special_tokens=False):
        return "".join("<e>" if i == END else chr(i - 10) for i in ids)


class CharTemplate:
    """``role:content|`` per message; keeps what it was asked to append."""

    tools = None

    def __init__(self):
        self.appended = []

    def render_prompt(self, messages, tools=None):
        text = "".join(f"{m['role'][0]}:{m['content']}|" for m in messages)
        return CharTokenizer().encode(f"[{len(tools)}]{text}" if tools else text)

    def continuation_ids(self, messages, num_old, sampled_ids, tools=None):
        assert messages[num_old - 1]["role"] == "assistant"
        self.appended.append(messages[num_old:])
        return self.render_prompt(messages[num_old:])


class FixedTemplate(CharTemplate):
    """Appends given ids."""

    def __init__(self, *appended_ids):
        super().__init__()
        self.ids = iter(appended_ids)

    def continuation_ids(self, *args, **kwargs):
        super().continuation_ids(*args, **kwargs)
        return next(self.ids)


class ScriptedClient:
    """Answers turn by turn; keeps prompts and sampling."""

    def __init__(self, *turns):
        self.turns, self.prompts, self.samplings, self.conversations = list(turns), [], [], []

    async def generate(self, prompt_ids, sampling, conversation_id):
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        self.conversations.append(conversation_id)
        turn = self.turns.pop(0)
        stop_reason = "stop"
        if isinstance(turn, tuple):
            turn, stop_reason = turn
        ids = [*CharTokenizer().encode(turn), END] if isinstance(turn, str) else turn
        if stop_reason == "length" and isinstance(turn, str):
            ids = ids[:-1]
        return TokenOutput(
            token_ids=ids, logprobs=[-0.5] * len(ids), stop_reason=stop_reason, policy_versions=[3] * len(ids)
        )


def schema(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


SEARCH = FunctionTool(lambda query: (f"found {query}", 0.25), "search", schema("search", query={"type": "string"}))


def call(name="search", **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments or {'query': 'x'}})}</tool_call>"


def roll_out(
    *turns, tools=(SEARCH,), limit=2000, template=None, sampling=None, extra_info=None, client=None, **options
):
    client = client or ScriptedClient(*turns)
    template = template or CharTemplate()
    loop = ToolAgentLoop(
        client=client,
        chat_template=template,
        tokenizer=CharTokenizer(),
        max_response_tokens=limit,
        end_token_ids=frozenset({END}),
        tools={tool.name: tool for tool in tools},
        **options,
    )
    prompt = Prompt(
        row_id="row-5", messages=[{"role": "user", "content": "Q"}], data_source="d", extra_info=extra_info or {}
    )
    trajectory = asyncio.run(loop.run(prompt, sampling or SamplingParams(max_tokens=limit)))
    trajectory.check()
    return trajectory, client, template


def text_of(trajectory, mask):
    ids = [i for i, m in zip(trajectory.response_ids, trajectory.loss_mask, strict=True) if m == mask]
    return CharTokenizer().decode(ids)


def test_sampled_ids_are_kept_and_tool_answers_are_masked():
    trajectory, client, _ = roll_out("Hm " + call(query="a"), "done")

    assert text_of(trajectory, 1) == f"Hm {call(query='a')}<e>done<e>"
    assert text_of(trajectory, 0) == "t:found a|"
    assert CharTokenizer().decode(trajectory.prompt_ids) == "[1]u:Q|"
    assert client.prompts[1] == trajectory.prompt_ids + trajectory.response_ids[:-5]
    assert client.conversations[0] == client.conversations[1]
    for mask, logprob, version in zip(
        trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.policy_versions, strict=True
    ):
        assert (logprob, version) == ((-0.5, 3) if mask else (0.0, -1))
    assert [m["role"] for m in trajectory.messages] == ["assistant", "tool", "assistant"]
    assert trajectory.messages[0]["tool_calls"][0]["function"] == {"name": "search", "arguments": {"query": "a"}}
    assert trajectory.messages[0]["content"] == "Hm "
    assert trajectory.messages[2] == {"role": "assistant", "content": "done"}
    assert trajectory.num_turns == 4
    assert trajectory.metrics["num_tool_calls"] == 1
    assert trajectory.reward is None


def test_lengths_agree_where_the_limit_cuts():  # O13
    template = FixedTemplate([21, 22, 23])
    client = ScriptedClient([11, 12, 13, 14], [31, 32, 33, 34, 35])
    calls = ParserThatAlwaysCalls()
    trajectory, client, _ = roll_out(limit=8, template=template, client=client, parser=calls)

    assert trajectory.response_ids == [11, 12, 13, 14, 21, 22, 23, 31]
    assert trajectory.loss_mask == [1, 1, 1, 1, 0, 0, 0, 1]
    assert trajectory.rollout_logprobs == [-0.5] * 4 + [0.0] * 3 + [-0.5]
    assert trajectory.is_truncated
    assert client.samplings[1].max_tokens == 1


def test_a_tool_answer_that_does_not_fit_ends_the_conversation():  # O13
    client = ScriptedClient([11, 12, 13, 14])
    trajectory, client, _ = roll_out(
        limit=8, template=FixedTemplate([21] * 6), client=client, parser=ParserThatAlwaysCalls()
    )
    assert trajectory.response_ids == [11, 12, 13, 14]
    assert trajectory.loss_mask == [1, 1, 1, 1]
    assert len(client.prompts) == 1
    assert trajectory.is_truncated
    assert trajectory.metrics["ended_by_tool_response"] == 1
    assert [m["role"] for m in trajectory.messages] == ["assistant"]


class ParserThatAlwaysCalls:
    """For ids that are no text."""

    def parse_ids(self, ids, tokenizer, schemas, *, is_truncated):
        from lit_rl.agents.tool_parsers import FunctionCall, ParsedMessage

        return ParsedMessage("", [FunctionCall(name="search", arguments='{"query": "x"}')])


@pytest.fixture(autouse=True)
def parser_option(monkeypatch):
    """Let tests pass a parser object as ``parser=``."""
    build = ToolAgentLoop.__init__

    def init(self, *, parser=None, **kwargs):
        build(self, **kwargs)
        self.parser = parser or self.parser

    monkeypatch.setattr(ToolAgentLoop, "__init__", init)


@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "search", "arguments": {"query": "who wro', call(query="x")[:-12]]
)
def test_a_cut_call_is_not_run(text):  # O03
    trajectory, client, _ = roll_out((text, "length"), limit=2000)
    assert trajectory.is_truncated
    assert trajectory.loss_mask == [1] * len(text)
    assert "num_tool_calls" not in trajectory.metrics
    assert len(client.prompts) == 1


def test_calls_beyond_the_limit_are_refused_and_counted():  # O02
    two = f"{call(query='a')}\n{call(query='b')}"
    trajectory, _, template = roll_out(two, "ok")
    first, second = template.appended[0]
    assert first["content"] == "found a"
    assert second["content"].startswith("Not run")
    assert first["tool_call_id"] != second["tool_call_id"]
    assert [c["id"] for c in trajectory.messages[0]["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
    assert trajectory.metrics["num_refused_calls"] == 1

    _, _, template = roll_out(two, "ok", max_parallel_calls=2)
    assert [m["content"] for m in template.appended[0]] == ["found a", "found b"]


@pytest.mark.parametrize(  # O04
    ("body", "expected"),
    [
        ('{"name": "search", "arguments": "{\\"query\\":\\"x\\"}"}', "found x"),
        ('{"name": "search", "arguments": ["x"]}', "JSON object"),
        ('{"name": "search", "arguments": null}', "JSON object"),
        ('{"name": "search"}', "Malformed"),
        ('{"name": 3, "arguments": {}}', "Malformed"),
        ('{"name": "search", "arguments": {"query": NaN}}', "NaN"),
        ("{bad", "Malformed"),
    ],
)
def test_wrong_arguments_are_answered_and_the_loop_goes_on(body, expected):
    trajectory, _, template = roll_out(f"<tool_call>{body}</tool_call>", "ok")
    assert expected in template.appended[0][0]["content"]
    assert text_of(trajectory, 1).endswith("ok<e>")
    assert trajectory.metrics.get("num_invalid_calls", 0) == (expected != "found x")


def test_unknown_tools_are_named_and_repeated_mistakes_end_the_conversation():  # O05
    wrong = call(name="serch")
    trajectory, client, template = roll_out(wrong, wrong, "never", max_consecutive_invalid_calls=2)
    assert "Available tools: search" in template.appended[0][0]["content"]
    assert len(client.prompts) == 2
    assert trajectory.metrics["ended_by_invalid_calls"] == 1
    assert trajectory.loss_mask[-1] == 1

    trajectory, client, _ = roll_out(wrong, call(), wrong, "end", max_consecutive_invalid_calls=2)
    assert len(client.prompts) == 4
    assert "ended_by_invalid_calls" not in trajectory.metrics


def test_turn_limits():
    trajectory, client, _ = roll_out(*[call()] * 5, max_assistant_turns=2)
    assert (len(client.prompts), trajectory.metrics["num_tool_calls"]) == (2, 1)
    trajectory, client, _ = roll_out(*[call()] * 5, max_user_turns=2)
    assert (len(client.prompts), trajectory.metrics["num_tool_calls"]) == (3, 2)
    assert trajectory.num_turns == 2 + 3 + 1
    assert trajectory.metrics["ended_by_max_turns"] == 1


def test_an_empty_response_is_consistent():
    trajectory, _, _ = roll_out(client=ScriptedClient([]))
    assert (trajectory.response_ids, trajectory.loss_mask, trajectory.num_turns) == ([], [], 2)


def test_ids_after_the_end_token_do_not_enter_the_conversation():
    ids = [*CharTokenizer().encode(call()), END, 99, 99]
    trajectory, client, _ = roll_out(client=ScriptedClient(ids, "ok"))
    assert 99 not in trajectory.response_ids


def test_each_turn_has_its_own_seed():
    _, client, _ = roll_out(call(), "ok", sampling=SamplingParams(max_tokens=2000, seed=7))
    first, second = (sampling.seed for sampling in client.samplings)
    assert first == 7
    assert second != 7
    assert 0 <= second < 2**63


def test_a_row_selects_its_tools():
    other = FunctionTool(lambda: "o", "other", schema("other"))
    trajectory, _, _ = roll_out("hi", tools=(SEARCH, other))
    assert CharTokenizer().decode(trajectory.prompt_ids).startswith("[2]")
    trajectory, _, template = roll_out(
        call(), "hi", tools=(SEARCH, other), extra_info={"tool_selection": ["other", "gone"]}
    )
    assert CharTokenizer().decode(trajectory.prompt_ids).startswith("[1]")
    assert "Unknown tool" in template.appended[0][0]["content"]


class Counting(BaseTool):
    def __init__(self):
        super().__init__({}, OpenAIFunctionToolSchema.model_validate(schema("count")))
        self.events = []

    async def create(self, instance_id=None, *, start, **kwargs):
        self.events.append(("create", start))
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        self.events.append(("execute", kwargs["agent_data"].turn))
        return ToolResponse(text="1"), 0.5, {}

    async def calc_reward(self, instance_id, **kwargs):
        return 2.0

    async def release(self, instance_id, **kwargs):
        self.events.append("release")


def test_a_class_tool_lives_over_the_turns_and_may_score():
    tool, extra_info = Counting(), {"tools_kwargs": {"count": {"create_kwargs": {"start": 9}}}}
    turns = [f"<tool_call>{json.dumps({'name': 'count', 'arguments': {}})}</tool_call>"] * 2
    trajectory, _, _ = roll_out(*turns, "ok", tools=[tool], extra_info=extra_info, score_with_tools=True)
    assert tool.events == [("create", 9), ("execute", 1), ("execute", 2), "release"]
    assert trajectory.reward == 3.0
    assert trajectory.reward_parts == {"tool_reward": 1.0, "tool_reward/count": 2.0}
    # What is left of the reward, the tool's last word, belongs to the last turn.
    assert trajectory.turn_rewards == [0.5, 0.5]


def test_bad_tools_kwargs_name_the_row():
    with pytest.raises(ValueError, match=r"row-5.*gone"):
        roll_out("x", extra_info={"tools_kwargs": {"gone": {}}})


def test_media_for_a_text_policy_is_refused():
    tool = FunctionTool(lambda: ToolResponse(image=["img"]), "search", schema("search"))
    with pytest.raises(ValueError, match=r"row-5.*images"):
        roll_out('<tool_call>{"name": "search", "arguments": {}}</tool_call>', tools=[tool])


def test_kept_media_go_to_the_trajectory_in_order_and_the_policy_reads_a_placeholder():
    tool = FunctionTool(
        lambda query: ToolResponse(text=f"of {query}", image=[f"img {query}"]), "search", SEARCH.tool_schema
    )
    calls = call(query="a") + call(query="b")
    trajectory, _, _ = roll_out(calls, "ok", tools=[tool], tool_media="keep", max_parallel_calls=2)
    assert trajectory.media == {"image": ["img a", "img b"]}
    assert text_of(trajectory, 0) == "t:[image]of a|t:[image]of b|"
    prompt = Prompt(row_id="r", messages=[], data_source="d")
    assert ScoreRequest.from_trajectory(prompt, trajectory).extra_info["media"] == trajectory.media


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_parallel_calls": 0}, "max_parallel_calls=0"),
        ({"max_tool_response_tokens": 0}, "max_tool_response_tokens=0"),
        ({"tool_response_truncate_side": "top"}, "'top'"),
        ({"tool_parser": "nope"}, "nope"),
        ({"tool_media": "show"}, "'show'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        roll_out("x", **options)


@pytest.mark.parametrize(  # O09
    ("side", "expected"),
    [
        ("left", "(truncated)...fghij"),
        ("right", "abcde...(truncated)"),
        ("middle", "abc...(truncated)...ij"),
    ],
)
def test_long_answers_are_cut_in_tokens(side, expected):
    assert truncate_text("abcdefghij", 5, side, CharTokenizer()) == expected
    assert truncate_text("abcde", 5, side, CharTokenizer()) == "abcde"
    long = truncate_text("ab" * 100_000, 2, side, CharTokenizer())
    assert len(long.replace("...", "").replace("(truncated)", "")) == 2
    assert len(truncate_text("abcdef", 1, side, CharTokenizer()).replace("...", "").replace("(truncated)", "")) == 1


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_no_character_is_broken_at_the_cut(side, tokenizer):  # O09
    for limit in range(1, 12):
        text = truncate_text("日本語🙂🙃 été " * 10, limit, side, tokenizer)
        assert "\ufffd" not in text
        kept = text.replace("(truncated)", "").replace("...", "")
        assert len(tokenizer.encode(kept, add_special_tokens=False)) <= limit + 1


def test_a_cut_answer_adds_as_many_masked_tokens_as_ids():  # O09
    tool = FunctionTool(lambda query: "y" * 50, "search", SEARCH.tool_schema)
    trajectory, _, _ = roll_out(call(), "ok", tools=[tool], max_tool_response_tokens=10)
    assert text_of(trajectory, 0) == "t:yyyyy...(truncated)...yyyyy|"
    assert trajectory.loss_mask.count(0) == len("t:yyyyy...(truncated)...yyyyy|")
    assert trajectory.metrics["num_truncated_tool_responses"] == 1


def test_sampled_ids_survive_a_real_template(tokenizer):
    template = ChatTemplate(tokenizer)
    ids = [tokenizer.encode(t, add_special_tokens=False) + [tokenizer.eos_token_id] for t in (call(query="a"), "bye")]

    client = ScriptedClient(*ids)
    loop = ToolAgentLoop(
        client=client,
        chat_template=template,
        tokenizer=tokenizer,
        max_response_tokens=500,
        end_token_ids=frozenset({tokenizer.eos_token_id}),
        tools={"search": SEARCH},
    )
    prompt = Prompt(row_id="1", messages=[{"role": "user", "content": "Q"}], data_source="d")
    trajectory = asyncio.run(loop.run(prompt, SamplingParams(max_tokens=500)))

    assert trajectory.response_ids[: len(ids[0])] == ids[0]
    assert trajectory.response_ids[-len(ids[1]) :] == ids[1]
    between = tokenizer.decode(trajectory.response_ids[len(ids[0]) : -len(ids[1])])
    assert "found a" in between
    assert sum(trajectory.loss_mask) == len(ids[0]) + len(ids[1])


def test_the_loop_loads_without_torch():
    import subprocess
    import sys

    code = "import sys, lit_rl.agents.tool_agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path(__file__).parent).returncode == 0
