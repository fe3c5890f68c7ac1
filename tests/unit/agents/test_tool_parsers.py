"""Tool calls found in sampled text, for every format."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.agents.tool_parsers import get_tool_parser

NAMES = ["hermes", "qwen3_coder", "llama3_json", "mistral", "gpt-oss", "fenced_json"]
ARGUMENTS = {"query": "café {a:{b:1}} 北京", "filter": {"year": {"gte": 2020}}}
JSON = json.dumps(ARGUMENTS)


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def call(name="A", arguments="{}"):
    return f'{{"name": "{name}", "arguments": {arguments}}}'


# One message with two calls per format: text, content, tools needed.
MESSAGES = {
    "hermes": (f"Look.\n{hermes(call('search', JSON), call('add', '{}'))}\nbye", "Look.\n\n\nbye"),
    "llama3_json": (
        f'Look.\n{{"name": "search", "parameters": {JSON}}}; {{"name": "add", "parameters": {{}}}}',
        "Look.\n",
    ),
    "mistral": (f"Look.\n[TOOL_CALLS] [{call('search', JSON)}, {call('add')}]", "Look.\n"),
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm to=functions.no<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Look.\n<|end|><|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>"
        f"{JSON}<|call|><|start|>assistant to=functions.add<|channel|>commentary <|constrain|>json<|message|>"
        "{}<|call|>",
        "Look.\n",
    ),
    "fenced_json": (f"Look.\n```json\n{call('search', JSON)}\n```\n```tool_call\n{call('add')}\n```", "Look.\n\n"),
    "qwen3_coder": (
        "Look.\n<tool_call>\n<function=search>\n<parameter=query>\ncafé {a:{b:1}} 北京\n</parameter>\n"
        '<parameter=filter>\n{"year": {"gte": 2020}}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "Look.\n",
    ),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "filter": {"type": "object"},
                    "n": {"type": "integer"},
                    "x": {"type": ["null", "number"]},
                    "b": {"type": "boolean"},
                    "free": {},
                },
            },
        },
    }
]


@pytest.mark.parametrize("name", NAMES)
def test_two_calls_with_nested_arguments_are_found_in_order(name):  # O01, O02
    text, expected_content = MESSAGES[name]
    content, calls = get_tool_parser(name).parse(text, TOOLS)
    assert [call.name for call in calls] == ["search", "add"]
    assert [json.loads(call.arguments) for call in calls] == [ARGUMENTS, {}]
    assert content == expected_content


def test_hermes_keeps_the_text_on_both_sides():  # O01
    text = (
        'Let me look.\n<tool_call>\n{"name": "search", "arguments": {"query": "caf\\u00e9 {a:{b:1}} 北京", '
        '"filter": {"year": {"gte": 2020}}}}\n</tool_call>\nthanks'
    )
    content, calls = get_tool_parser("hermes").parse(text)
    assert json.loads(calls[0].arguments) == ARGUMENTS
    assert "Let me look." in content
    assert "thanks" in content


@pytest.mark.parametrize("name", NAMES)
def test_no_prefix_of_a_message_holds_a_call_that_the_message_does_not(name):  # O03
    text, _ = MESSAGES[name]
    parser = get_tool_parser(name)
    calls = parser.parse(text, TOOLS).calls
    found = 0
    for end in range(len(text) + 1):
        message = parser.parse(text[:end], TOOLS, is_truncated=True)
        assert message.calls == calls[: len(message.calls)]
        assert len(message.calls) >= found
        found = len(message.calls)
    assert found == 2


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "search", "arguments": {"query": "who wro',
        '<tool_call>{"name": "write", "arguments": {"path": "x"}}',
    ],
)
def test_an_unclosed_hermes_call_is_none(text):  # O03
    message = get_tool_parser("hermes").parse(text)
    assert (message.calls, message.content) == ([], text)


DRAFTS = {
    "hermes": hermes(call()),
    "fenced_json": f"```json\n{call()}\n```",
    "llama3_json": '{"name": "A", "parameters": {}}',
    "mistral": f"[TOOL_CALLS] [{call()}]",
    "qwen3_coder": "<tool_call>\n<function=A>\n</function>\n</tool_call>",
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_call_drafted_in_reasoning_does_not_count(name):  # O06
    parser, draft = get_tool_parser(name), DRAFTS[name]
    assert [c.name for c in parser.parse(f"<think>maybe {draft} helps</think>\n{draft}").calls] == ["A"]
    assert parser.parse(f"<think>maybe {draft} helps").calls == []
    # The template may have opened the reasoning.
    assert len(parser.parse(f"maybe {draft} helps</think>\n{draft}").calls) == 1
    assert parser.parse(f"maybe {draft} helps</think>\nno").calls == []


def test_gpt_oss_calls_in_the_analysis_channel_do_not_count():  # O06
    text = "<|channel|>analysis to=functions.A <|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Hi"
    message = get_tool_parser("gpt-oss").parse(text)
    assert (message.calls, message.content) == ([], "Hi")


def test_tags_inside_an_argument_are_part_of_it():
    value = "</tool_call> <tool_call> </think> <think> }}"
    _, calls = get_tool_parser("hermes").parse(hermes(call("w", json.dumps({"v": value}))))
    assert json.loads(calls[0].arguments) == {"v": value}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("{bad", "no valid JSON"),
        ('{"arguments": {}}', "'name'"),
        ('{"name": 3, "arguments": {}}', "'name'"),
        ('{"name": "A"}', "'arguments'"),
        ("[1]", "JSON object"),
        ("[" * 3000, "no valid JSON"),
    ],
)
def test_a_closed_but_unreadable_call_is_reported(body, reason):  # O04
    message = get_tool_parser("hermes").parse(f"{hermes(body)}\n{hermes(call('B'))}")
    assert [c.name for c in message.calls] == ["B"]
    assert len(message.malformed) == 1
    assert reason in message.malformed[0]


def test_null_and_string_arguments_are_passed_on():  # O04
    _, calls = get_tool_parser("hermes").parse(hermes(call("A", "null"), call("B", '"{\\"q\\": 1}"')))
    assert [c.arguments for c in calls] == ["null", '"{\\"q\\": 1}"']


def test_qwen3_coder_gives_values_the_type_of_their_schema():
    values = {"query": "5", "n": "7", "x": "2.0", "b": "true", "filter": "{'a': 1}", "free": "[1, 2]", "other": "9"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=search>\n{body}</function>\n</tool_call>"
    _, calls = get_tool_parser("qwen3_coder").parse(text, TOOLS)
    assert json.loads(calls[0].arguments) == {
        "query": "5",
        "n": 7,
        "x": 2,
        "b": True,
        "filter": {"a": 1},
        "free": [1, 2],
        "other": "9",
    }


def test_qwen3_coder_keeps_what_does_not_fit_as_text_and_tolerates_open_tags():
    text = "<tool_call><function=search><parameter=n>many<parameter=x>NULL<parameter=free>{1, 2}"
    _, calls = get_tool_parser("qwen3_coder").parse(text, TOOLS)
    assert json.loads(calls[0].arguments) == {"n": "many", "x": None, "free": "{1, 2}"}
    assert get_tool_parser("qwen3_coder").parse(text, TOOLS, is_truncated=True).calls == []


def test_mistral_reads_the_newer_form_with_ids():
    text = '[TOOL_CALLS]add[CALL_ID]abc123[ARGS]{"a": 1}[TOOL_CALLS]sub[ARGS]{"b": {}}'
    _, calls = get_tool_parser("mistral").parse(text)
    assert [(c.name, c.arguments, c.tool_call_id) for c in calls] == [
        ("add", '{"a": 1}', "abc123"),
        ("sub", '{"b": {}}', None),
    ]


def test_ordinary_code_blocks_and_json_are_content():
    text = 'Use\n```python\nprint({"name": 1})\n```\n```json\n{"a": 1}\n```'
    for name in ("fenced_json", "llama3_json"):
        message = get_tool_parser(name).parse(text)
        assert (message.content, message.calls, message.malformed) == (text, [], [])


def test_ids_are_decoded_with_special_tokens_and_end_tokens_left_out_of_the_content():
    class Tokenizer:
        all_special_tokens = ["<|im_end|>", "<pad>"]

        def decode(self, ids, skip_special_tokens):
            assert not skip_special_tokens
            return "".join(chr(i) if i < 1000 else "<|im_end|>" for i in ids)

    ids = [ord(c) for c in f"hi {hermes(call())}"] + [1000, 1000]
    message = get_tool_parser("hermes").parse_ids(ids, Tokenizer())
    assert (message.content, [c.name for c in message.calls]) == ("hi ", ["A"])


def test_unknown_parsers_are_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"hermes.*mistral"):
        get_tool_parser("herms")
    with pytest.raises(ValueError, match="dotted path"):
        get_tool_parser("json.JSONDecoder")
    assert type(get_tool_parser("lit_rl.agents.tool_parsers.hermes.HermesToolParser")) is type(
        get_tool_parser("hermes")
    )


PIECES = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "a", "arguments": {}}', '{"name": "a",', "{", "}",
    "[", '"',
    "<function=", "<function=f>", "<parameter=", "<parameter=p>", "</function>", ">", "[TOOL_CALLS]", "[ARGS]", "f",
    "1e999",
    "<|start|>", "<|channel|>", "commentary to=functions.", "<|message|>", "<|call|>", "```", "```json\n", "\n", "é",
    "null",
    "\ud800", "{1}", "{(1,): 2}", ";",
]  # fmt: skip


@settings(max_examples=300)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=30), is_truncated=st.booleans())
def test_no_text_makes_a_parser_raise(pieces, is_truncated):
    for name in NAMES:
        message = get_tool_parser(name).parse("".join(pieces), TOOLS, is_truncated=is_truncated)
        assert all(isinstance(c.name, str) and c.name and isinstance(c.arguments, str) for c in message.calls)


@pytest.mark.timeout(60)  # a quadratic search over 60,000 characters takes minutes
@pytest.mark.parametrize("name", NAMES)
def test_long_repetitive_texts_take_linear_time(name):
    parser = get_tool_parser(name)
    for piece in PIECES:
        parser.parse(piece * (60_000 // len(piece)), TOOLS)
