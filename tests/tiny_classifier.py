"""A reward model of the tiny model's size: a sequence classifier with random weights, saved as a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from lit_rl.models import load_tokenizer

TOKENIZER = "bundled/tiny-random"


def save_tiny_classifier(folder: Path) -> str:
    """Write model and tokenizer and return the folder."""
    from lit_rl.models import resolve_model

    config = AutoConfig.from_pretrained(resolve_model(TOKENIZER), num_labels=1)
    tokenizer = load_tokenizer(TOKENIZER)
    config.pad_token_id = tokenizer.pad_token_id
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tiny_score(folder: str, messages: list[dict[str, str]]) -> float:
    """What the classifier says, computed without lit_rl."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False).input_ids
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        return float(model(input_ids=torch.tensor([ids])).logits[0, -1])
