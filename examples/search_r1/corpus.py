"""Write a corpus of real facts and questions about it: passages, training questions, held-out questions.

Run: python examples/search_r1/corpus.py --out_dir data/search_r1

Writes corpus.jsonl (one passage a line, Search-R1's form), warmup_questions.jsonl (for demonstrations), and prompt
files in verl's columns: train.parquet, train_two_hop.parquet (half of the questions need two searches), check.parquet
and check_two_hop.parquet (training questions that a warm-up is measured on), test.parquet (200 questions about entities
that are nowhere in training), test_two_hop.parquet, and both once more as
test_no_tool.parquet and test_no_tool_two_hop.parquet, asked without a tool.
Questions of demonstrations, of measuring them and of reinforcement learning are apart too. Takes seconds, downloads
nothing, and gives the same files for the same seed.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from facts import NUM_CITIES, NUM_REGIONS, Passage, Question, World, build_world
from rows import search_row, write_json_lines, write_parquet

SYSTEM = "Answer the question with facts found by the tool search, then reply <answer>...</answer>."
SYSTEM_NO_TOOL = "Answer the question with as few words as possible, only the answer."
NUM_TRAIN, NUM_WARMUP, NUM_CHECK, NUM_TEST = 1600, 640, 48, 200
ONE_HOP_SOURCE, TWO_HOP_SOURCE, NO_TOOL_SOURCE = "geo_one_hop", "geo_two_hop", "geo_no_tool"


def passage_row(number: int, passage: Passage) -> dict[str, str]:
    """Return a line of the corpus: the quoted title, a newline, the text."""
    return {"id": str(number), "contents": f'"{passage.title}"\n{passage.text}'}


def draw(questions: Sequence[Question], rng: random.Random, num: int, two_hop_share: float) -> list[Question]:
    """Draw different questions, as many of each attribute.

    Drawn evenly, cities would drown the countries, of which there are few with many attributes each.

    Args:
        questions: To draw from.
        rng: Source of randomness.
        num: Questions to draw.
        two_hop_share: Share of two-hop questions, exact up to rounding.

    Raises:
        ValueError: If there are not enough.
    """
    num_two = round(num * two_hop_share)
    drawn = []
    for num_hops, wanted in ((1, num - num_two), (2, num_two)):
        by_attribute: dict[str, list[Question]] = {}
        for question in questions:
            if question.num_hops == num_hops:
                by_attribute.setdefault(question.attribute, []).append(question)
        pools = [by_attribute[attribute] for attribute in sorted(by_attribute)]
        for pool in pools:
            rng.shuffle(pool)
        chosen: list[Question] = []
        while len(chosen) < wanted:
            pools = [pool for pool in pools if pool]
            if not pools:
                raise ValueError(
                    f"There are {len(chosen)} questions with {num_hops} hop(s), {wanted} are asked for. Raise "
                    "--num_cities, or lower the numbers of questions."
                )
            chosen += [pool.pop() for pool in pools][: wanted - len(chosen)]
        drawn += chosen
    rng.shuffle(drawn)
    return drawn


def prompt_rows(questions: Iterable[Question], split: str) -> list[dict[str, Any]]:
    """Return rows for a policy with the search tool."""
    return [
        search_row(
            data_source=ONE_HOP_SOURCE if question.num_hops == 1 else TWO_HOP_SOURCE,
            index=index,
            split=split,
            question=question.text,
            system=SYSTEM,
            user=question.text,
            answers=[question.answer],
            extra_info={"num_hops": question.num_hops},
        )
        for index, question in enumerate(questions)
    ]


def no_tool_rows(questions: Iterable[Question], split: str) -> list[dict[str, Any]]:
    """Return rows that ask for the answer at once."""
    return [
        search_row(
            data_source=NO_TOOL_SOURCE,
            index=index,
            split=split,
            question=question.text,
            system=SYSTEM_NO_TOOL,
            user=question.text,
            answers=[question.answer],
            agent_name="single_turn_agent",
            extra_info={"num_hops": question.num_hops, "need_tools_kwargs": False},
        )
        for index, question in enumerate(questions)
    ]


def write_corpus(out_dir: Path, seed: int = 0, num_cities: int = NUM_CITIES, num_regions: int = NUM_REGIONS) -> World:
    """Write all files.

    Args:
        out_dir: Folder; made when missing.
        seed: Of everything random.
        num_cities: See `build_world`.
        num_regions: See `build_world`.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    world = build_world(seed, num_cities, num_regions)
    rng = random.Random(seed + 1)
    seen = [question for question in world.questions if not question.is_held_out]
    held_out = [question for question in world.questions if question.is_held_out]
    warmup = draw(seen, rng, NUM_WARMUP, two_hop_share=0.5)
    used = {question.text for question in warmup}
    rest = [question for question in seen if question.text not in used]
    check, check_two_hop = (draw(rest, rng, NUM_CHECK, two_hop_share=share) for share in (0.0, 1.0))
    used |= {question.text for question in [*check, *check_two_hop]}
    rest = [question for question in rest if question.text not in used]
    train, train_two_hop = (draw(rest, rng, NUM_TRAIN, two_hop_share=share) for share in (0.2, 0.5))
    test, test_two_hop = (draw(held_out, rng, NUM_TEST, two_hop_share=share) for share in (0.2, 0.5))
    _check_apart([*warmup, *check, *check_two_hop, *train, *train_two_hop], [*test, *test_two_hop])

    write_json_lines(
        out_dir / "corpus.jsonl", (passage_row(number, passage) for number, passage in enumerate(world.passages))
    )
    write_json_lines(
        out_dir / "warmup_questions.jsonl",
        (
            {
                "question": q.text,
                "answer": q.answer,
                "queries": q.queries,
                "passages": q.passages,
                "num_hops": q.num_hops,
            }
            for q in warmup
        ),
    )
    for name, questions in (
        ("train", train),
        ("train_two_hop", train_two_hop),
        ("check", check),
        ("check_two_hop", check_two_hop),
        ("test", test),
        ("test_two_hop", test_two_hop),
    ):
        write_parquet(out_dir / f"{name}.parquet", prompt_rows(questions, name))
    for name, questions in (("test_no_tool", test), ("test_no_tool_two_hop", test_two_hop)):
        write_parquet(out_dir / f"{name}.parquet", no_tool_rows(questions, name))
    return world


def _check_apart(training: Sequence[Question], held_out: Sequence[Question]) -> None:
    common = {question.entity for question in training} & {question.entity for question in held_out}
    assert not common, f"entities in training and held out: {sorted(common)[:5]}"


def main() -> None:
    """Write the files and print what they hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out_dir", type=Path, default=Path("data/search_r1"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_cities", type=int, default=NUM_CITIES)
    parser.add_argument("--num_regions", type=int, default=NUM_REGIONS)
    arguments = parser.parse_args()
    world = write_corpus(arguments.out_dir, arguments.seed, arguments.num_cities, arguments.num_regions)
    hops = Counter((question.is_held_out, question.num_hops) for question in world.questions)
    print(
        f"{arguments.out_dir}: {len(world.passages)} passages; training questions: {hops[False, 1]} one-hop, "
        f"{hops[False, 2]} two-hop; held out: {hops[True, 1]} one-hop, {hops[True, 2]} two-hop"
    )


if __name__ == "__main__":
    main()
