"""Parsers that find tool calls in sampled text, one class per format."""

from __future__ import annotations

import importlib

from lit_rl.agents.tool_parsers.base import FunctionCall, ParsedMessage, ToolParser
from lit_rl.agents.tool_parsers.fenced_json import FencedJsonToolParser
from lit_rl.agents.tool_parsers.gpt_oss import GptOssToolParser
from lit_rl.agents.tool_parsers.hermes import HermesToolParser
from lit_rl.agents.tool_parsers.llama3_json import Llama3JsonToolParser
from lit_rl.agents.tool_parsers.mistral import MistralToolParser
from lit_rl.agents.tool_parsers.qwen3_coder import Qwen3CoderToolParser

__all__ = ["FunctionCall", "ParsedMessage", "ToolParser", "get_tool_parser"]

_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesToolParser,
    "qwen3_coder": Qwen3CoderToolParser,
    "llama3_json": Llama3JsonToolParser,
    "mistral": MistralToolParser,
    "gpt-oss": GptOssToolParser,
    "gpt_oss": GptOssToolParser,
    "fenced_json": FencedJsonToolParser,
}


def get_tool_parser(name: str) -> ToolParser:
    """Return a parser.

    Args:
        name: ``hermes``, ``qwen3_coder``, ``llama3_json``, ``mistral``, ``gpt-oss`` (or ``gpt_oss``),
            ``fenced_json``, or the dotted path of a `ToolParser` subclass.

    Raises:
        ValueError: For anything else.
    """
    if name in _PARSERS:
        return _PARSERS[name]()
    module_name, _, class_name = name.rpartition(".")
    try:
        parser_class = getattr(importlib.import_module(module_name), class_name) if module_name else None
    except (ImportError, AttributeError):
        parser_class = None
    if not (isinstance(parser_class, type) and issubclass(parser_class, ToolParser)):
        raise ValueError(
            f"Unknown tool parser '{name}'; use one of {sorted(_PARSERS)}, or the dotted path of a ToolParser class."
        )
    return parser_class()
