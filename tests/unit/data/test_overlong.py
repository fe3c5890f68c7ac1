import pytest

from lit_rl.data import ChatTemplate, WithoutOverlong
from lit_rl.types import Prompt

# One word is one token here: the template writes words of the letter x, and "x x x" has as many ids as letters.
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('bad row') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
    "{% for t in tools or [] %}{{ t.text }}{% endfor %}"
)


class Prompts(list):
    """A list of prompts is a prompt source."""


def prompts(*texts: str) -> Prompts:
    return Prompts(
        Prompt(row_id=f"r{i}", messages=[{"role": "user", "content": text}], data_source="x")
        for i, text in enumerate(texts)
    )


@pytest.fixture
def template(base_tokenizer) -> ChatTemplate:
    return ChatTemplate(base_tokenizer, custom_template=TEMPLATE, tools=[{"text": " x" * 15}])


# O35: a prompt of 20 tokens, and 15 more of tool text.
def test_tools_count_towards_the_limit(template: ChatTemplate) -> None:
    rows = prompts(" x" * 20, " x" * 5)
    assert len(template.render_prompt(rows[0].messages)) == 35

    filtered = WithoutOverlong(rows, template, 30)
    assert [filtered[i].row_id for i in range(len(filtered))] == ["r1"]
    assert (filtered.counts.num_kept, filtered.counts.num_overlong, filtered.counts.longest_tokens) == (1, 1, 35)
    assert len(WithoutOverlong(rows, template, 35)) == 2
    assert len(WithoutOverlong(rows, template, 30, tools=[])) == 2


def test_nothing_left_is_an_error(template: ChatTemplate) -> None:
    with pytest.raises(ValueError, match="max_prompt_tokens=19 leaves none of 1 prompts: the longest has 35 tokens"):
        WithoutOverlong(prompts(" x" * 20), template, 19)


def test_a_failed_rendering_is_no_long_prompt(template: ChatTemplate) -> None:
    rows = prompts(" x", "bad", " x" * 90, " x")
    filtered = WithoutOverlong(rows, template, 30, max_failed_fraction=0.25)
    counts = filtered.counts
    assert (counts.num_kept, counts.num_overlong, counts.num_failed) == (2, 1, 1)
    assert "row r1" in counts.first_error
    assert counts.describe().startswith("Prompts: 2 kept, 1 too long (longest 105 tokens), 1 failed to render (row r1")


def test_many_failed_renderings_are_an_error(template: ChatTemplate) -> None:
    with pytest.raises(ValueError, match="1 of 2 prompts failed to render.*row r0: .*bad row"):
        WithoutOverlong(prompts("bad", " x"), template, 30)


# O35: rows of a tool loop are measured with its tools, others without.
def test_each_row_is_measured_with_its_own_tools(template: ChatTemplate) -> None:
    rows = prompts(" x" * 20, " x" * 20)
    filtered = WithoutOverlong(
        rows, template, 30, tools=lambda row: [{"text": " x" * 15}] if row.row_id == "r0" else []
    )
    assert [filtered[i].row_id for i in range(len(filtered))] == ["r1"]
    assert filtered.counts.num_overlong == 1
