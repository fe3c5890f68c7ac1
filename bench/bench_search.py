"""Queries per second and latency of the retrieval server on one core; with --vectors, of faiss on many vectors.

The corpus is the laptop recipe's (over 5,000 passages); requests hold eight queries, all different, one request at a
time, as a client sees them. Server and client share the one core. Embeddings are computed once and kept in the cache
folder. For a million synthetic vectors: python bench/bench_search.py --vectors 1000000
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples" / "search_r1"
CACHE = Path(os.environ.get("LIT_RL_CACHE") or "~/.cache/lit_rl").expanduser() / "bench_search"
BATCH, NUM_REQUESTS, NUM_WARMUP = 8, 120, 5
DIMENSION = 384


def run() -> dict[str, float]:
    """Return queries per second in batches of eight, and the 99th percentile of the requests' milliseconds."""
    sys.path.insert(0, str(EXAMPLES))
    from server_process import serving

    core = min(os.sched_getaffinity(0))
    folder = _prepared()
    questions = _questions(folder)
    arguments = ["--index_path", str(folder / "flat.index"), "--corpus_path", str(folder / "corpus.jsonl")]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # the server inherits it
    try:
        with tempfile.TemporaryDirectory() as logs, serving(arguments, Path(logs) / "server.log") as url:
            batches = [questions[start : start + BATCH] for start in range(0, len(questions), BATCH)]
            for batch in batches[:NUM_WARMUP]:
                _ask(url, batch)
            seconds = [_ask(url, batch) for batch in batches[NUM_WARMUP : NUM_WARMUP + NUM_REQUESTS]]
    finally:
        os.sched_setaffinity(0, before)
    assert len(seconds) == NUM_REQUESTS
    return {
        "retrieval_queries_per_s": BATCH * NUM_REQUESTS / sum(seconds),
        "retrieval_p99_ms": 1000 * sorted(seconds)[int(0.99 * NUM_REQUESTS)],
    }


def many_vectors(num: int, kinds: Sequence[str]) -> dict[str, float]:
    """Return build seconds, size and search milliseconds of each kind of index over random unit vectors, one thread.

    Args:
        num: Vectors.
        kinds: Of ``flat``, ``ivf`` and ``hnsw``; ``flat`` first, since recall is measured against it.
    """
    sys.path.insert(0, str(EXAMPLES))
    import faiss
    import numpy as np
    from build_index import build_faiss_index

    random = np.random.default_rng(0)
    # Clustered, as embeddings are: on unclustered ones no approximate index finds anything.
    centres = random.standard_normal((1000, DIMENSION), dtype=np.float32)
    vectors = centres[random.integers(0, 1000, num)] + 0.7 * random.standard_normal((num, DIMENSION), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = vectors[:64] + 0.3 / DIMENSION**0.5 * random.standard_normal((64, DIMENSION), dtype=np.float32)
    numbers: dict[str, float] = {}
    exact = None
    for kind in kinds:
        started = time.perf_counter()
        index = build_faiss_index(vectors, kind)
        numbers[f"{kind}_build_s"] = time.perf_counter() - started
        if kind == "ivf":
            index.nprobe = 32
        if kind == "hnsw":
            index.hnsw.efSearch = 128
        started = time.perf_counter()
        found = index.search(queries, 3)[1]
        numbers[f"{kind}_search_ms_per_query"] = 1000 * (time.perf_counter() - started) / len(queries)
        exact = found if exact is None else exact
        common = [len(set(row) & set(right)) / 3 for row, right in zip(found, exact, strict=True)]
        numbers[f"{kind}_recall_at_3"] = float(np.mean(common))
        with tempfile.NamedTemporaryFile() as file:
            faiss.write_index(index, file.name)
            numbers[f"{kind}_gb"] = os.path.getsize(file.name) / 1e9
    return numbers


def _prepared() -> Path:
    """The corpus and its flat index, built on the first run."""
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(EXAMPLES / "corpus.py"), "--out_dir", str(CACHE)], check=True)
    arguments = ["--corpus_path", str(CACHE / "corpus.jsonl"), "--index_path", str(CACHE / "flat.index")]
    subprocess.run([sys.executable, str(EXAMPLES / "build_index.py"), *arguments, "--num_threads", "1"], check=True)
    return CACHE


def _questions(folder: Path) -> list[str]:
    """Different questions, as many as are asked."""
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    return [row["extra_info"]["question"] for row in rows][: BATCH * (NUM_REQUESTS + NUM_WARMUP)]


def _ask(url: str, queries: list[str]) -> float:
    """Seconds of one request."""
    body = json.dumps({"queries": queries, "topk": 3, "return_scores": True}).encode()
    started = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": "application/json"})) as reply:
        result = json.loads(reply.read())["result"]
    seconds = time.perf_counter() - started
    assert [len(documents) for documents in result] == [3] * len(queries)
    return seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, help="measure indexes over so many synthetic vectors instead")
    parser.add_argument("--kinds", nargs="+", default=["flat", "ivf", "hnsw"], help="indexes to measure")
    options = parser.parse_args()
    numbers = run() if options.vectors is None else many_vectors(options.vectors, options.kinds)
    for key, value in numbers.items():
        print(f"{key}: {value:,.3f}")
