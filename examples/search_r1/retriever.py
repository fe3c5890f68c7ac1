"""Ranked passage numbers for queries, by embeddings (faiss) or by words (BM25).

Used by retrieval_server.py. Loading checks that index, corpus and embedding model belong together. Texts are not
here: the server looks the numbers up in the corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from embedder import Embedder

BM25 = "bm25"
_NUM_PROBES = 32
_SEARCH_DEPTH = 128


class Retriever(Protocol):
    """What the server needs."""

    kind: str
    size: int

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Return per query at most ``topk`` pairs of passage number and score, best first."""
        ...


class DenseRetriever:
    """Inner products of unit vectors.

    Args:
        index_path: A faiss index (flat, IVF, HNSW, ...), as build_index.py writes it.
        embedder: Of the model that the passages were embedded with.
        on_gpu: Search on all GPUs.
        num_threads: Threads of faiss.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file is no index, its dimension is not the model's, or this faiss has no GPU support.
    """

    def __init__(self, index_path: Path, embedder: Embedder, on_gpu: bool = False, num_threads: int = 1) -> None:
        import faiss

        faiss.omp_set_num_threads(num_threads)
        if not index_path.is_file():
            raise FileNotFoundError(f"--index_path {index_path}: there is no such file. build_index.py writes one.")
        if on_gpu and not hasattr(faiss, "StandardGpuResources"):
            raise ValueError(
                "--faiss_gpu: this faiss is built without GPU support. Install faiss-gpu, or leave it out."
            )
        try:
            # Mapped, not read: several servers share one copy, and a flat index of 60 GB starts at once.
            index = faiss.read_index(str(index_path), faiss.IO_FLAG_READ_ONLY if on_gpu else _mapped_flag(faiss))
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ValueError(f"--index_path {index_path}: is no faiss index ({reason}).") from error
        if index.d != embedder.dimension:
            raise ValueError(
                f"--index_path {index_path} holds vectors of {index.d} numbers, but --retriever_model {embedder.name} "
                f"makes {embedder.dimension}. Name the model that the index was built with, or build it again."
            )
        self.embedder = embedder
        self.kind = type(index).__name__
        self.size = int(index.ntotal)
        if hasattr(index, "nprobe"):
            index.nprobe = min(_NUM_PROBES, index.nlist)
        if hasattr(index, "hnsw"):
            index.hnsw.efSearch = _SEARCH_DEPTH
        self.index: Any = faiss.index_cpu_to_all_gpus(index) if on_gpu else index

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Embed and search; see `Retriever`."""
        scores, numbers = self.index.search(self.embedder.embed_queries(queries), topk)
        return [_pairs(row, values) for row, values in zip(numbers, scores, strict=True)]


class BM25Retriever:
    """Words that queries and passages share.

    Args:
        index_path: Folder written by build_index.py.

    Raises:
        FileNotFoundError: If there is no such folder.
    """

    def __init__(self, index_path: Path) -> None:
        import bm25s

        if not index_path.is_dir():
            raise FileNotFoundError(
                f"--index_path {index_path}: there is no such folder. build_index.py --retriever_name bm25 writes one."
            )
        self.bm25: Any = bm25s.BM25.load(str(index_path), mmap=True)
        self.kind = BM25
        self.size = int(self.bm25.scores["num_docs"])

    def search(self, queries: Sequence[str], topk: int) -> list[list[tuple[int, float]]]:
        """Rank by BM25; a passage without any word of the query is no result."""
        import bm25s

        tokens = bm25s.tokenize(list(queries), return_ids=False, show_progress=False)
        ranked = []
        for words in tokens:
            numbers, scores = self.bm25.retrieve([words], k=min(topk, self.size), show_progress=False)
            ranked.append([pair for pair in _pairs(numbers[0], scores[0]) if pair[1] > 0])
        return ranked


def load_retriever(
    *,
    index_path: Path,
    retriever_name: str,
    retriever_model: str | None = None,
    on_gpu: bool = False,
    num_threads: int = 1,
) -> Retriever:
    """Return the retriever of the server's options; errors are those of the classes."""
    if retriever_name == BM25:
        return BM25Retriever(index_path)
    return DenseRetriever(index_path, Embedder(retriever_name, retriever_model), on_gpu, num_threads)


def check_sizes(retriever: Retriever, num_passages: int, index_path: Path, corpus_path: Path) -> None:
    """Raise ``ValueError`` unless index and corpus hold the same number of passages."""
    if retriever.size != num_passages:
        raise ValueError(
            f"--index_path {index_path} has {retriever.size} passages, --corpus_path {corpus_path} has {num_passages}: "
            "they do not belong together. Build the index of this corpus with build_index.py."
        )


def _pairs(numbers: np.ndarray, scores: np.ndarray) -> list[tuple[int, float]]:
    # faiss fills up with -1 where it found fewer.
    return [(int(n), float(score)) for n, score in zip(numbers, scores, strict=True) if n >= 0]


def _mapped_flag(faiss: Any) -> int:
    return int(getattr(faiss, "IO_FLAG_MMAP_IFC", faiss.IO_FLAG_MMAP))
