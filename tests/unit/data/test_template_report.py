import pytest

from lit_rl.data.chat_template import ChatTemplate


@pytest.mark.parametrize(
    ("name", "turn_end", "after", "generation_prompt"),
    [
        ("chatml", "<|im_end|>", "\n", "<|im_start|>assistant\n"),
        ("qwen3", "<|im_end|>", "\n", "<|im_start|>assistant\n"),
        ("llama3", "<|eot_id|>", "", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("mistral", "</s>", "", ""),
        ("harmony", "<|end|>", "", "<|start|>assistant"),
        ("glm", "", "", "<|assistant|>\n"),
    ],
)
def test_ends_and_starts_of_turns(make_template, name: str, turn_end: str, after: str, generation_prompt: str) -> None:
    report = make_template(name).self_test()
    assert (report.turn_end, report.after_turn_end, report.generation_prompt) == (turn_end, after, generation_prompt)
    assert report.is_exact
    assert report.has_tool_turns


def test_habits_are_told_apart(make_template) -> None:
    reports = {name: make_template(name).self_test() for name in ("chatml", "qwen3", "llama3", "mistral", "harmony")}
    assert {name for name, report in reports.items() if report.strips_reasoning} == {"qwen3"}
    assert {name for name, report in reports.items() if report.merges_tool_messages} == {"qwen3"}
    assert {name for name, report in reports.items() if report.repeats_preamble} == {"mistral"}
    assert "You are helpful." in reports["chatml"].default_preamble
    assert "Knowledge" in reports["llama3"].default_preamble
    assert reports["qwen3"].default_preamble == reports["mistral"].default_preamble == ""


def test_another_end_token_than_the_tokenizers_is_reported(make_template) -> None:
    assert make_template("chatml").self_test().problems == []
    assert (
        "'<|end|>', but the tokenizer's end token is '<|return|>'" in make_template("harmony").self_test().problems[0]
    )


def test_the_bundled_template_is_described_in_lines(base_tokenizer) -> None:
    text = ChatTemplate(base_tokenizer).self_test().describe()
    assert r"turns end with '<|im_end|>\n'" in text
    assert "inserts a default system prompt" in text
    assert "problem" not in text


def test_a_single_turn_template_is_a_reported_problem(base_tokenizer) -> None:
    source = "{% if messages | length > 1 %}{{ raise_exception('one turn only') }}{% endif %}{{ messages[0].content }}"
    report = ChatTemplate(base_tokenizer, custom_template=source).self_test()
    assert not report.is_exact
    assert "one turn only" in report.problems[0]
