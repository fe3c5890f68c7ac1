from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lit_rl.data import AnsweredPrompts, ChatTemplateError, Conversation, ConversationFiles, tokenize_conversation
from lit_rl.data.conversation_tokens import tokenize_source
from lit_rl.types import Prompt

PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
SEARCH = {"type": "function", "function": {"name": "search", "description": "Finds.", "parameters": PARAMETERS}}


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def calling(content: str = "", **arguments: str) -> dict:
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "search", "arguments": arguments}}
    return assistant(content, tool_calls=[call])


def result(content: str) -> dict:
    return {"role": "tool", "name": "search", "tool_call_id": "abcdefghi", "content": content}


def conversation(*messages: dict, tools=(), row_id: str = "r") -> Conversation:
    return Conversation(row_id=row_id, messages=list(messages), tools=list(tools))


def learned_texts(template, tokens) -> list[str]:
    """Text of each stretch of learned ids."""
    stretches, current = [], []
    for token, mask in zip([*tokens.response_ids, 0], [*tokens.loss_mask, 0], strict=True):
        if mask:
            current.append(token)
        elif current:
            stretches.append(template.tokenizer.decode(current))
            current = []
    return stretches


def test_learned_is_what_the_policy_writes_and_nothing_else(make_template) -> None:
    template = make_template("qwen3")
    row = conversation(user("Q1"), calling("I look.", q="x"), result("FOUND"), assistant("<answer>x</answer>"))

    tokens = tokenize_conversation(template, row)

    call = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'
    turns = learned_texts(template, tokens)
    assert turns == [
        f"<think>\n\n</think>\n\nI look.\n{call}<|im_end|>",
        "<think>\n\n</think>\n\n<answer>x</answer><|im_end|>",
    ]
    assert template.tokenizer.decode(tokens.prompt_ids) == "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\n<tool_response>\nFOUND\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert template.tokenizer.decode(tokens.response_ids) == turns[0] + between + turns[1]


# A policy meets in its rollouts the ids it has learned: prompt, sampled turn, appended ids, as agent loops join them.
@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3", "mistral", "harmony", "glm"])
def test_a_sequence_is_the_one_a_rollout_would_hold(make_template, name: str) -> None:
    template = make_template(name)
    messages = [user("Q1"), assistant("first answer"), user("Q2"), assistant("second answer")]

    tokens = tokenize_conversation(template, conversation(*messages))

    assert tokens.prompt_ids == template.render_prompt(messages[:1])
    first, second = learned_texts(template, tokens)
    assert "first answer" in first
    assert "second answer" in second
    assert "Q2" not in first + second
    sampled = tokens.response_ids[: tokens.loss_mask.index(0)]
    appended = template.continuation_ids(messages[:3], 2, sampled)
    assert tokens.response_ids[len(sampled) :][: len(appended)] == appended
    end_ids = {template.tokenizer.eos_token_id, *template.turn_closers} | (
        {template.tokenizer.convert_tokens_to_ids("<|user|>")} if name == "glm" else set()
    )
    assert sampled[-1] in end_ids
    assert tokens.response_ids[-1] in end_ids
    assert tokens.loss_mask[-1] == 1


def test_messages_of_weight_zero_and_after_the_last_answer_are_not_learned(make_template) -> None:
    template = make_template("chatml")
    row = conversation(user("Q1"), assistant("wrong", weight=0), user("No."), assistant("right"), user("Thanks."))

    tokens = tokenize_conversation(template, row)

    assert learned_texts(template, tokens) == ["right<|im_end|>"]
    assert "wrong<|im_end|>" in template.tokenizer.decode(tokens.response_ids)
    assert "Thanks" not in template.tokenizer.decode(tokens.response_ids)


def test_tools_of_a_row_are_shown_and_those_of_the_run_where_it_has_none(make_template) -> None:
    template = make_template("qwen3")
    messages = [user("Q"), assistant("A")]

    own = tokenize_conversation(template, conversation(*messages, tools=[SEARCH]))
    of_the_run = tokenize_conversation(template, conversation(*messages), tools=[SEARCH])

    assert '"name": "search"' in template.tokenizer.decode(own.prompt_ids)
    assert of_the_run.prompt_ids == own.prompt_ids == template.render_prompt(messages[:1], [SEARCH])


def test_a_template_that_leaves_calls_out_is_an_error_that_names_the_fix(make_template, base_tokenizer) -> None:
    from lit_rl.data import ChatTemplate

    template = ChatTemplate(base_tokenizer)  # SmolLM2's: it writes content only
    with pytest.raises(ChatTemplateError, match=r"message 1: the template leaves the call of 'search' out.*content"):
        tokenize_conversation(template, conversation(user("Q"), calling("I look."), result("R"), assistant("A")))


def test_too_long_rows_are_left_out_and_counted_and_failures_stop_the_run(make_template, caplog) -> None:
    template = make_template("chatml")
    rows = [conversation(user("Q"), assistant("A " * length)) for length in (1, 2, 100)]

    kept = tokenize_source(rows, template, 60, option="data.train_data")

    assert len(kept) == 2
    assert "data.train_data: 2 conversations kept, 1 too long (longest" in caplog.text
    with pytest.raises(ValueError, match=r"data\.max_conversation_tokens=3 leaves none of 3 conversations"):
        tokenize_source(rows, template, 3, option="data.train_data")
    broken = conversation(user("Q"), {"role": "assistant", "content": "A", "tool_calls": [{"function": {"name": "f"}}]})
    with pytest.raises(ValueError, match=r"data\.val_data: 1 of 4 conversations failed to render.*row 3"):
        tokenize_source([*rows, broken], make_template("glm"), 500, option="data.val_data")


def test_rows_come_as_json_lines_json_and_parquet_with_or_without_json_text(tmp_path) -> None:
    messages = [user("Q"), calling(q="x"), result("R"), assistant("A")]
    as_openai = json.loads(json.dumps(messages))
    as_openai[1]["content"] = None
    as_openai[1]["tool_calls"][0]["function"]["arguments"] = '{"q": "x"}'
    rows = [{"messages": as_openai, "tools": [SEARCH]}, {"messages": [user("Q"), assistant("B")], "tools": None}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    text = [{key: json.dumps(value) for key, value in row.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(text), tmp_path / "text.parquet")

    for name in ("rows.jsonl", "rows.json", "rows.parquet", "text.parquet"):
        first, second = list(ConversationFiles([tmp_path / name]))
        assert first.messages == messages, name
        assert first.tools[0]["function"]["name"] == "search"
        assert second.messages == [user("Q"), assistant("B")], name
        assert second.tools == []
    assert len(ConversationFiles([tmp_path / "rows.json"], max_samples=1)) == 1


def test_prompts_with_known_answers_become_conversations() -> None:
    prompts = [
        Prompt(row_id="a", messages=[user("1+1")], data_source="s", ground_truth=2),
        Prompt(row_id="b", messages=[user("?")], data_source="s"),
    ]

    (row,) = AnsweredPrompts(prompts, "It is {ground_truth}. {sure}", max_samples=1)

    assert row == conversation(user("1+1"), assistant("It is 2. {sure}"), row_id="a")
    with pytest.raises(ValueError, match="row b has no ground truth"):
        AnsweredPrompts(prompts)
    with pytest.raises(ValueError, match=r"answer='Yes' must hold \{ground_truth\}"):
        AnsweredPrompts(prompts, "Yes")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "Q"}, r"row 0: column 'messages' must be a list .*Columns present: text"),
        ({"messages": "Q: A"}, r"column 'messages' is text, but no valid JSON"),
        ({"messages": [user("Q")]}, r"has no assistant message \(of weight 1\), so there is nothing to learn"),
        ({"messages": [user("Q"), assistant("A", weight=0)]}, r"nothing to learn"),
        ({"messages": [user("Q"), assistant("A", weight=0.5)]}, r"message 1 with weight 0\.5; it is 0 or 1"),
        ({"messages": [assistant("A"), user("Q")]}, r"begins with an assistant message"),
        ({"messages": [user("Q"), assistant("A"), assistant("B")]}, r"two assistant messages in a row \(message 2\)"),
        ({"messages": [user("Q"), {"role": "assistant"}]}, r"message 1 \(role 'assistant'\) without content"),
        ({"messages": [user("Q"), {"content": "A"}]}, r"message 1 without a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, assistant("A")]}, r"text only"),
        ({"messages": [user("Q"), assistant("A")], "tools": ["search"]}, r"column 'tools' must be a list of function"),
    ],
)
def test_a_malformed_row_is_refused_by_place_and_column(tmp_path, row: dict, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))

    with pytest.raises(ValueError, match=message):
        ConversationFiles([tmp_path / "rows.jsonl"])
