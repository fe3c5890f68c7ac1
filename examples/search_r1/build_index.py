"""Build the index of a corpus: embeddings with progress and resume, then faiss; or BM25.

Run: python examples/search_r1/build_index.py --corpus_path data/search_r1/corpus.jsonl
         --index_path data/search_r1/flat.index

Embeddings go to a memory-mapped file beside the index and are noted block by block, so an interrupted run goes on
where it was, and a corpus larger than the memory can be embedded. They are kept: another --index_type takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from corpus_file import CorpusFile
from embedder import FAMILIES, Embedder
from retriever import BM25

BLOCK = 2048
"""Passages embedded between two notes of progress."""
INDEX_TYPES = ("flat", "ivf", "hnsw")
_TRAINING_VECTORS_PER_LIST = 64
_HNSW_NEIGHBOURS = 32


def embed_corpus(corpus: CorpusFile, embedder: Embedder, path: Path, batch_size: int = 64) -> np.ndarray:
    """Return the ``[N, D]`` float32 embeddings of a corpus, mapped from ``path``; computes what is missing.

    Args:
        corpus: The passages.
        embedder: The model.
        path: A ``.npy`` file; its progress is noted in ``path`` + ``.progress.json``.
        batch_size: Passages per forward pass.
    """
    from tqdm import tqdm

    shape = (len(corpus), embedder.dimension)
    about = {"model": embedder.name, "corpus": _fingerprint(corpus), "shape": list(shape)}
    notes = path.with_name(path.name + ".progress.json")
    done = _embedded_so_far(path, notes, about)
    vectors = np.lib.format.open_memmap(path, mode="r+" if done else "w+", dtype=np.float32, shape=shape)
    with tqdm(total=shape[0], initial=done, unit="passages", disable=None, file=sys.stderr) as bar:
        for start in range(done, shape[0], BLOCK):
            stop = min(start + BLOCK, shape[0])
            vectors[start:stop] = embedder.embed_passages(list(corpus.texts(start, stop)), batch_size)
            vectors.flush()
            _write_json(notes, {**about, "done": stop})
            bar.update(stop - start)
    return vectors


def build_faiss_index(vectors: np.ndarray, index_type: str, num_threads: int = 1, on_gpu: bool = False) -> Any:
    """Return a faiss index over unit vectors with inner products.

    Args:
        vectors: ``[N, D]`` float32.
        index_type: ``flat`` (exact), ``ivf`` (about 4 sqrt(N) lists), or ``hnsw`` (a graph).
        num_threads: Threads of faiss.
        on_gpu: Train and fill it on the GPUs.
    """
    import faiss

    faiss.omp_set_num_threads(num_threads)
    size, dimension = vectors.shape
    if index_type == "flat":
        index = faiss.IndexFlatIP(dimension)
    elif index_type == "hnsw":
        index = faiss.IndexHNSWFlat(dimension, _HNSW_NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    else:
        # A list wants some 39 training vectors; a small corpus gets fewer lists.
        num_lists = max(1, min(int(4 * size**0.5), size // _TRAINING_VECTORS_PER_LIST))
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(dimension), dimension, num_lists, faiss.METRIC_INNER_PRODUCT)
        chosen = np.random.default_rng(0).permutation(size)[: num_lists * _TRAINING_VECTORS_PER_LIST]
        index.train(np.ascontiguousarray(vectors[np.sort(chosen)]))
    if on_gpu:
        index = faiss.index_cpu_to_all_gpus(index)
    for start in range(0, size, 65_536):
        index.add(np.ascontiguousarray(vectors[start : start + 65_536]))
    return faiss.index_gpu_to_cpu(index) if on_gpu else index


def build_bm25(corpus: CorpusFile, folder: Path) -> None:
    """Write a BM25 index of a corpus into a folder."""
    import bm25s

    tokens = bm25s.tokenize(list(corpus.texts(0, len(corpus))), show_progress=False)
    bm25 = bm25s.BM25()
    bm25.index(tokens, show_progress=False)
    bm25.save(str(folder))


def _embedded_so_far(path: Path, notes: Path, about: dict[str, Any]) -> int:
    """Passages whose embeddings are on disk; 0 where the file is of another corpus or model."""
    if not (path.exists() and notes.exists()):
        return 0
    noted = json.loads(notes.read_text())
    done = int(noted.pop("done"))
    if noted == about:
        return done
    print(f"{path}: is of another corpus or model, and is written anew.", file=sys.stderr)
    return 0


def _fingerprint(corpus: CorpusFile) -> str:
    """Tell two corpora apart by size and a thousand passages, without reading all of them."""
    digest = hashlib.sha256(f"{corpus.path.stat().st_size} {len(corpus)}".encode())
    for number in range(0, len(corpus), max(1, len(corpus) // 1000)):
        digest.update(corpus[number]["contents"].encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _write_json(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus_path", type=Path, required=True)
    parser.add_argument("--index_path", type=Path, required=True, help="file to write; a folder for bm25")
    parser.add_argument("--index_type", choices=INDEX_TYPES, default="flat")
    parser.add_argument("--retriever_name", choices=[*FAMILIES, BM25], default="minilm")
    parser.add_argument("--retriever_model", help="folder or hub id (default: the family's usual one)")
    parser.add_argument("--embeddings_path", type=Path, help="where embeddings are kept (default: beside the index)")
    parser.add_argument("--max_length", type=int, default=256, help="tokens of a passage that count")
    parser.add_argument("--batch_size", type=int, default=64, help="passages per forward pass")
    parser.add_argument("--num_threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--faiss_gpu", action="store_true", help="embed and build on the GPUs")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build and write."""
    options = parse_arguments(arguments)
    try:
        corpus = CorpusFile(options.corpus_path)
        options.index_path.parent.mkdir(parents=True, exist_ok=True)
        if options.retriever_name == BM25:
            build_bm25(corpus, options.index_path)
        else:
            _build_dense(corpus, options)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise SystemExit(f"build_index: error: {error}") from error
    print(f"{options.index_path}: index of {len(corpus)} passages")


def _build_dense(corpus: CorpusFile, options: argparse.Namespace) -> None:
    import faiss
    import torch

    torch.set_num_threads(options.num_threads)
    device = "cuda" if options.faiss_gpu else "cpu"
    embedder = Embedder(options.retriever_name, options.retriever_model, options.max_length, device)
    path = options.embeddings_path or options.index_path.with_name(f"{options.corpus_path.stem}.embeddings.npy")
    vectors = embed_corpus(corpus, embedder, path, options.batch_size)
    index = build_faiss_index(vectors, options.index_type, options.num_threads, options.faiss_gpu)
    aside = options.index_path.with_name(options.index_path.name + ".partial")
    faiss.write_index(index, str(aside))
    aside.replace(options.index_path)


if __name__ == "__main__":
    main()
