"""Six chat templates on top of SmolLM2's tokenizer, each with its special tokens and end token."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lit_rl.data.chat_template import ChatTemplate
from lit_rl.models.loading import load_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"
SPECIALS = {
    "chatml": ["<|im_end|>", "<|im_start|>"],
    "qwen3": ["<|im_end|>", "<|im_start|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "harmony": ["<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
    "glm": ["<|endoftext|>", "[gMASK]", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
}


@pytest.fixture(scope="session")
def base_tokenizer() -> Any:
    return load_tokenizer("bundled/tiny-random")


@pytest.fixture(scope="session")
def make_template(base_tokenizer: Any) -> Callable[..., ChatTemplate]:
    """Build a `ChatTemplate` of a named fixture; the first of its special tokens is the end token."""
    tokenizers = {}
    for name, specials in SPECIALS.items():
        tokenizer = copy.deepcopy(base_tokenizer)
        tokenizer.add_tokens(specials, special_tokens=True)
        tokenizer.eos_token = specials[0]
        tokenizer.chat_template = (FIXTURES / f"{name}.jinja").read_text()
        tokenizers[name] = tokenizer

    def make(name: str, **settings: Any) -> ChatTemplate:
        return ChatTemplate(tokenizers[name], **settings)

    return make
