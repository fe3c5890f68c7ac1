"""Reward, demonstrations, template and result table of the recipe."""

import csv
import json
from pathlib import Path

import demonstrations
import pytest
import report_seeds
import results
from corpus_file import CorpusFile
from reward import compute_score
from rows import write_json_lines
from small_corpus import NUM_PASSAGES, write_small_corpus

from lit_rl.agents.tool_parsers import get_tool_parser
from lit_rl.cli import DEFAULT_DATA, RLCLI, base_classes
from lit_rl.data import ChatTemplate, ConversationFiles
from lit_rl.data.conversation_tokens import tokenize_conversation
from lit_rl.models.loading import load_tokenizer

ROOT = Path(__file__).parents[3]
OSLO = {"target": ["Oslo"]}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "search", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "<answer>Oslo</answer>"}


def say(text):
    return {"role": "assistant", "content": text}


def score(*messages, source="searchR1_geo_one_hop", **options):
    text = "".join(message["content"] for message in messages if message["role"] == "assistant")
    return compute_score(source, text, OSLO, {"messages": list(messages)}, **options)


def test_a_right_answer_after_one_search_scores_most_and_further_searches_cost():
    one = score(CALL, RESULT, say("<answer> oslo. </answer>"), format_score=0.1, search_price=0.05)
    two = score(CALL, RESULT, CALL, RESULT, say("<answer>Oslo</answer>"), format_score=0.1, search_price=0.05)
    assert one == {"score": 1.1, "em": 1.0, "contains": 1.0, "format": 1.0, "searches": 1.0}
    assert two["score"] == pytest.approx(1.05)
    assert two["searches"] == 2.0


def test_wrong_answers_pay_nothing_for_their_searches():
    # Else groups without a right answer would teach not to search.
    for searches in (1, 2):
        wrong = score(*[CALL, RESULT] * searches, say("<answer>Bergen</answer>"), format_score=0.1, search_price=0.05)
        assert (wrong["score"], wrong["em"], wrong["format"]) == (0.1, 0.0, 1.0)
        assert score(*[CALL, RESULT] * searches, say("Oslo"), format_score=0.1, search_price=0.05)["score"] == 0.0


@pytest.mark.parametrize(
    "messages",
    [
        (say("<answer>Oslo</answer>"),),  # no search
        (CALL, RESULT, say("It is <answer>Oslo</answer>")),
        (CALL, RESULT, say("<answer><tool_call>Oslo</answer>")),
        (CALL, RESULT, say("<answer>a</answer><answer>Oslo</answer>")),
        (CALL, RESULT, say("<answer>Oslo")),
        (CALL, RESULT, CALL),
        (),
    ],
)
def test_other_forms_earn_no_format_score(messages):
    assert score(*messages, format_score=0.1)["format"] == 0.0


def test_an_answer_in_a_tool_result_earns_nothing():  # O34
    assert score(CALL, RESULT, say("I do not know"), format_score=0.1)["score"] == 0.0
    assert score(CALL, RESULT, CALL, format_score=0.1)["em"] == 0.0


def test_without_a_tool_the_whole_text_is_the_answer():
    assert score(say("Oslo"), source="searchR1_geo_no_tool") == {"score": 1.0, "em": 1.0, "contains": 1.0}
    contained = score(say("The capital is Oslo."), source="searchR1_geo_no_tool")
    assert contained == {"score": 0.0, "em": 0.0, "contains": 1.0}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """Demonstrations over the small corpus, of one-hop questions and of one with two hops."""
    folder = tmp_path_factory.mktemp("demonstrations")
    _, index_path, world = write_small_corpus(folder)
    asked = [q for q in world.questions if max(q.passages) < NUM_PASSAGES][:20]
    as_row = lambda q: {  # noqa: E731
        "question": q.text, "answer": q.answer, "queries": q.queries, "passages": q.passages, "num_hops": q.num_hops
    }  # fmt: skip
    first, second = asked[0], asked[10]
    two_hops = {
        "question": "two?", "answer": second.answer, "queries": [first.text, second.text],
        "passages": [first.passages[0], second.passages[0]], "num_hops": 2,
    }  # fmt: skip
    write_json_lines(folder / "warmup_questions.jsonl", [*map(as_row, asked), two_hops])
    kept = demonstrations.write_demonstrations(folder, index_path, 21, 1 / 21, 0, folder / "out.jsonl")
    assert kept >= 20
    return folder / "out.jsonl", CorpusFile(folder / "corpus.jsonl")


def test_demonstrations_search_find_and_answer(shown):
    path, corpus = shown
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {len(row["messages"]) for row in rows} == {5, 7}
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system", "user", *["assistant", "tool"] * ((len(roles) - 3) // 2), "assistant"]
        answer = row["messages"][-1]["content"].removeprefix("<answer>").removesuffix("</answer>")
        assert answer in row["messages"][-2]["content"]
        assert row["messages"][-2]["content"].startswith('Doc 1 (Title: "')
        assert row["tools"] == [demonstrations.search_schema()]


def test_a_question_whose_search_misses_is_left_out(shown):
    _, corpus = shown

    class Misses:
        def search(self, queries, topk):
            return [[(7, 0.5)] for _ in queries]

    question = {"question": "q", "answer": "a", "queries": ["q"], "passages": [3], "num_hops": 1}
    assert demonstrations.conversation(question, Misses(), corpus) is None
    assert demonstrations.conversation({**question, "passages": [7]}, Misses(), corpus) is not None


def test_the_policy_learns_to_write_what_the_parser_reads_and_the_reward_pays(shown):
    template = ChatTemplate(
        load_tokenizer("bundled/tiny-random"), custom_template=str(ROOT / "examples/search_r1/chat_template.jinja")
    )
    assert template.self_test().problems == []
    rows = ConversationFiles([shown[0]])
    parser = get_tool_parser("hermes")
    for index in range(len(rows)):
        tokens = tokenize_conversation(template, rows[index])
        prompt = template.tokenizer.decode(tokens.prompt_ids)
        assert '<tool_call>{"name": "search", "arguments": {"query_list": ["..."]}}</tool_call>.<|im_end|>' in prompt
        learned = [i for i, mask in zip(tokens.response_ids, tokens.loss_mask, strict=True) if mask]
        turns = template.tokenizer.decode(learned).split("<|im_end|>")[:-1]
        queries = [m["tool_calls"][0]["function"]["arguments"] for m in rows[index].messages if m.get("tool_calls")]
        assert [json.loads(parser.parse(turn).calls[0].arguments) for turn in turns[:-1]] == queries
        assert turns[-1] == rows[index].messages[-1]["content"]


def test_too_few_questions_are_refused():
    questions = [{"num_hops": 1}] * 5
    with pytest.raises(ValueError, match=r"--num 8: there are 5 questions with 1 hop\(s\), not 8"):
        demonstrations.choose(questions, 8, 0.0, seed=0)


def test_results_weigh_questions_and_not_sources(tmp_path):
    prefix = "val-aux/searchR1_geo"
    row = {
        "step": 3, f"{prefix}_one_hop/em/mean": 0.5, f"{prefix}_two_hop/em/mean": 1.0,
        f"{prefix}_one_hop/searches/mean": 1.0,
        f"{prefix}_no_tool/em/mean": 0.0, f"{prefix}_no_tool/contains/mean": 0.2,
    }  # fmt: skip
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*row, "critic/score/mean"])
        writer.writeheader()
        writer.writerows([{"step": 2, "critic/score/mean": 1.0}, row])
    [read] = results.validations(tmp_path)
    numbers = results.summarise(read, {"one_hop": 160, "two_hop": 40})
    assert numbers == {
        "em": pytest.approx(0.6), "em_one_hop": 0.5, "em_two_hop": 1.0, "searches": 1.0, "searches_one_hop": 1.0
    }  # fmt: skip
    no_tool = results.summarise_no_tool(read)
    text = results.table([("before", no_tool, None), ("after", numbers, 1.25)], 200)
    assert "| before | 0.000 (0.000 to 0.019) | 0.200 | - | - | - | -, - | - |" in text
    assert "| after | 0.600 (0.531 to 0.665) | - | 0.500 | 1.000 | - | 1.000, - | 1.2 |" in text


def test_several_seeds_are_put_together_with_an_interval(tmp_path):
    folders = []
    for seed, em in ((1, 0.6), (2, 0.7), (3, 0.8)):
        folder = tmp_path / f"seed{seed}"
        run = folder / "runs/rl/today"
        run.mkdir(parents=True)
        stages = {"warmed up": {"em": 0.5, "format": 0.6}, "then reinforcement learning": {"em": em}}
        done = {"stages": stages, "num_questions": {"one_hop": 160, "two_hop": 40}, "minutes": {"rl": seed}, "total": 9}
        (folder / "results.json").write_text(json.dumps(done))
        curves = {"critic/score/mean": 0.1, "reward/em/mean": 0.1, "reward/searches/mean": 1}
        held_out = {f"val-aux/searchR1_geo_{hops}_hop/em/mean": em for hops in ("one", "two")}
        with (run / "metrics.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", *curves, *held_out])
            writer.writeheader()
            writer.writerows([{"step": 0, **held_out}, {"step": 1, **curves}, {"step": 2, **curves, **held_out}])
        folders.append(folder)
    text = report_seeds.table([json.loads((folder / "results.json").read_text()) for folder in folders])
    assert "| warmed up | 0.500 | - | - | 0.600 | - | - |" in text
    # Standard deviation 0.1, t 4.303 with two degrees of freedom: 0.248.
    assert "| then reinforcement learning | 0.700 +- 0.248 |" in text
    assert "took 1.0 to 3.0 minutes" in text
    report_seeds.plot(folders, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 5000


class ParseOnly(RLCLI):
    """Stops before anything is built."""

    def instantiate_classes(self) -> None:
        pass


@pytest.mark.parametrize(
    "names",
    [
        ("laptop",),
        ("laptop", "laptop_warmup"),
        ("laptop", "laptop_two_hop"),
        ("laptop", "laptop_two_hop", "laptop_warmup_two_hop"),
        ("qwen2.5-3b-8gpu",),
    ],
)
def test_the_recipes_configurations_parse_and_name_what_exists(names):
    paths = [ROOT / f"configs/search_r1/{name}.yaml" for name in names]
    arguments = [word for path in (ROOT / "configs/base/trainer_cpu.yaml", *paths) for word in ("--config", str(path))]
    config = ParseOnly(*base_classes(), args=arguments, run=False, default_data=DEFAULT_DATA).config
    agents, rewards = config.data.init_args.agents, config.data.init_args.rewards
    assert (ROOT / agents.tool_config_path).exists()
    assert (ROOT / rewards.function.split(":")[0]).exists()
    assert agents.chat_template is None or (ROOT / agents.chat_template).exists()
    assert all(len(path.read_text().splitlines()) <= 80 for path in paths)
    is_warmup = names[-1].startswith("laptop_warmup")
    assert config.model.class_path.rpartition(".")[2] == ("SFT" if is_warmup else "GRPO")
    if is_warmup:
        # It is measured with the tools, template and reward that reinforcement learning goes on with.
        assert agents.tool_config_path == "examples/search_r1/tools.yaml"
        assert agents.chat_template == "examples/search_r1/chat_template.jinja"
