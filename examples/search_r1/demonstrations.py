"""Write conversations that show how to search: for each training question its searches, what they found, the answer.

Run: python examples/search_r1/demonstrations.py --data_dir data/search_r1 --num 256 --two_hop_share 0.2

Reads warmup_questions.jsonl and asks the index; writes demonstrations.jsonl with ``messages`` and ``tools`` in OpenAI's
form. A two-hop question is shown with two searches: for the country, then for the fact. A conversation whose searches
do not find the passages is left out: it would teach to answer from nothing.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus import SYSTEM
from corpus_file import CorpusFile
from retriever import Retriever, check_sizes, load_retriever
from rows import read_json_lines, write_json_lines

from lit_rl.tools.search_tool import SearchTool, format_documents

TOPK = 2


def search_schema() -> dict[str, Any]:
    """Return the schema that the policy is shown in rollouts too."""
    return SearchTool({"retrieval_service_url": "http://unused"}).get_openai_tool_schema().to_dict()


def conversation(question: dict[str, Any], retriever: Retriever, corpus: CorpusFile) -> dict[str, Any] | None:
    """Return one demonstration, or ``None`` where a search misses its passage.

    Args:
        question: A line of warmup_questions.jsonl.
        retriever: Of the corpus.
        corpus: The passages.
    """
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question["question"]},
    ]
    found = retriever.search(question["queries"], TOPK)
    for turn, (query, passage, ranked) in enumerate(zip(question["queries"], question["passages"], found, strict=True)):
        if passage not in [number for number, _ in ranked]:
            return None
        call_id = f"call{turn:05d}"
        call = {"name": "search", "arguments": {"query_list": [query]}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": call_id, "function": call}]},
            {
                "role": "tool",
                "name": "search",
                "tool_call_id": call_id,
                "content": format_documents([corpus[number] for number, _ in ranked]),
            },
        ]
    messages.append({"role": "assistant", "content": f"<answer>{question['answer']}</answer>"})
    return {"messages": messages, "tools": [search_schema()]}


def choose(questions: Sequence[dict[str, Any]], num: int, two_hop_share: float, seed: int) -> list[dict[str, Any]]:
    """Draw questions with a share of two-hop ones, in random order.

    Raises:
        ValueError: If there are not enough.
    """
    rng = random.Random(seed)
    chosen = []
    for num_hops, wanted in ((1, num - round(num * two_hop_share)), (2, round(num * two_hop_share))):
        pool = [question for question in questions if question["num_hops"] == num_hops]
        if wanted > len(pool):
            raise ValueError(f"--num {num}: there are {len(pool)} questions with {num_hops} hop(s), not {wanted}.")
        chosen += rng.sample(pool, wanted)
    rng.shuffle(chosen)
    return chosen


def write_demonstrations(
    data_dir: Path, index_path: Path, num: int, two_hop_share: float, seed: int, out_path: Path
) -> int:
    """Write the file and return how many conversations it holds."""
    corpus_path = data_dir / "corpus.jsonl"
    corpus = CorpusFile(corpus_path)
    retriever = load_retriever(index_path=index_path, retriever_name="minilm")
    check_sizes(retriever, len(corpus), index_path, corpus_path)
    questions = choose(read_json_lines(data_dir / "warmup_questions.jsonl"), num, two_hop_share, seed)
    conversations = [conversation(question, retriever, corpus) for question in questions]
    kept = [row for row in conversations if row is not None]
    write_json_lines(out_path, kept)
    return len(kept)


def main() -> None:
    """Write the demonstrations and say how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data_dir", type=Path, default=Path("data/search_r1"))
    parser.add_argument("--index_path", type=Path, help="default: flat.index in the data folder")
    parser.add_argument("--num", type=int, default=256)
    parser.add_argument("--two_hop_share", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out_path", type=Path, help="default: demonstrations.jsonl in the data folder")
    options = parser.parse_args()
    index_path = options.index_path or options.data_dir / "flat.index"
    out_path = options.out_path or options.data_dir / "demonstrations.jsonl"
    try:
        kept = write_demonstrations(
            options.data_dir, index_path, options.num, options.two_hop_share, options.seed, out_path
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"demonstrations: error: {error}") from error
    print(f"{out_path}: {kept} of {options.num} conversations; the others' searches miss their passage")


if __name__ == "__main__":
    main()
