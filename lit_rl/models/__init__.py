"""The networks: loading, the packed actor, critic and reference, chunked log-probs, and the bfloat16 working copy."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Actor": "actor",
    "TokenScores": "actor",
    "Critic": "critic",
    "load_causal_lm": "loading",
    "load_tokenizer": "loading",
    "resolve_model": "loading",
    "PackedSequences": "packing",
    "pack": "packing",
    "unpack": "packing",
    "Reference": "reference",
    "Bf16WorkingCopy": "working_copy",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # Lazy, since transformers takes seconds to import and resolving a model's folder does not need it.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
