"""A corpus of some fifty passages and its index, as the scripts write them."""

from pathlib import Path

import build_index
from corpus import passage_row
from facts import World, build_world
from rows import write_json_lines

NUM_PASSAGES = 51


def write_small_corpus(folder: Path) -> tuple[Path, Path, World]:
    """Return the paths of corpus and flat index, and the facts: the first seventeen countries."""
    world = build_world(num_cities=0, num_regions=0)
    corpus_path, index_path = folder / "corpus.jsonl", folder / "flat.index"
    passages = world.passages[:NUM_PASSAGES]
    write_json_lines(corpus_path, (passage_row(number, passage) for number, passage in enumerate(passages)))
    build_index.main(
        ["--corpus_path", str(corpus_path), "--index_path", str(index_path), "--num_threads", "1", "--max_length", "64"]
    )
    return corpus_path, index_path, world
