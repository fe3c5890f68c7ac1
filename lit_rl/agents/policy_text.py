"""What an agent worker needs to turn text into token ids and back: tokenizer, chat template, end tokens.

Loaded once per worker. The model itself is never loaded here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class PolicyText:
    """The policy's tokenizer and what follows from it.

    Attributes:
        tokenizer: Hugging Face tokenizer, or an object with ``decode`` and ``eos_token_id``.
        chat_template: Renders conversations.
        end_token_ids: The tokenizer's end token and those of the model's generation configuration.
    """

    tokenizer: Any
    chat_template: Any
    end_token_ids: frozenset[int]

    def decode(self, token_ids: list[int]) -> str:
        """Text of ``token_ids`` without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True)) if token_ids else ""


def load_policy_text(
    model_path: str, chat_template_kwargs: dict[str, Any], chat_template: str | None = None
) -> PolicyText:
    """Load from a local model folder.

    Args:
        model_path: Folder (or hub id in the cache) of the policy.
        chat_template_kwargs: Further variables of the chat template.
        chat_template: Jinja text or file instead of the tokenizer's own template.
    """
    from transformers import AutoTokenizer

    from lit_rl.data.chat_template import ChatTemplate

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    ends = end_token_ids(tokenizer.eos_token_id, Path(model_path) / "generation_config.json")
    template = ChatTemplate(
        tokenizer,
        template_kwargs=chat_template_kwargs,
        custom_template=chat_template,
        end_token_ids=sorted(ends),
    )
    return PolicyText(tokenizer=tokenizer, chat_template=template, end_token_ids=ends)


def end_token_ids(tokenizer_end_id: int | None, generation_config: Path) -> frozenset[int]:
    """All ids that end a response: the tokenizer's, and the one or several of the generation configuration."""
    ids = set() if tokenizer_end_id is None else {tokenizer_end_id}
    if generation_config.is_file():
        configured = json.loads(generation_config.read_text()).get("eos_token_id")
        ids.update(configured if isinstance(configured, list) else [] if configured is None else [configured])
    return frozenset(ids)
