"""A discriminative reward model: a sequence classifier reads the conversation and returns one number.

Use: ``data.rewards.function: lit_rl.rewards.reward_model:compute_score`` with ``kwargs: {model: NAME}``, where NAME is
one of ``data.rewards.models`` (kind ``classifier``), or with ``kwargs: {base_url: ..., model: ...}`` and a server such
as ``vllm serve MODEL --runner pooling``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lit_rl.rewards.reward_server import RewardServerError, post_json

if TYPE_CHECKING:
    from lit_rl.rewards.served_models import ServedRewardModel


async def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    *,
    model: str,
    base_url: str | None = None,
    models: Mapping[str, ServedRewardModel] | None = None,
    tokenizer: str | None = None,
    timeout_s: float = 50.0,
    api_key_variable: str | None = None,
) -> dict[str, float]:
    """Score one response.

    Args:
        solution_str: The response.
        ground_truth: Not used.
        extra_info: With ``prompt_messages``.
        model: Name of the classifier among ``models``, or on the server.
        base_url: Of the server, without a path; ``/classify`` is asked. ``None``: the run serves the classifier.
        models: Reward models of the run, given by the reward worker.
        tokenizer: Folder or hub id of its tokenizer, whose chat template renders the conversation; default: ``model``.
        timeout_s: For all attempts; keep it below ``data.rewards.timeout_s``.
        api_key_variable: Environment variable with a bearer token.

    Returns:
        ``score``: the classifier's last output, before any activation.

    Raises:
        RewardServerError: If the server gives none.
    """
    messages = [*extra_info.get("prompt_messages", ()), {"role": "assistant", "content": solution_str}]
    if base_url is None:
        return {"score": (await (models or {})[model].classify(messages))[-1]}
    body = {"model": model, "input": render(tokenizer or model, messages), "use_activation": False}
    url = base_url.rstrip("/") + "/classify"
    reply = await post_json(url, body, timeout_s=timeout_s, api_key_variable=api_key_variable)
    try:
        return {"score": float(reply["data"][-1]["probs"][-1])}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RewardServerError(f"{url}: the answer has no data[-1].probs[-1].") from error


def render(tokenizer: str, messages: list[dict[str, Any]]) -> str:
    """Return the conversation as text, without a begin token where the server's tokenizer will add it."""
    loaded = load_tokenizer(tokenizer)
    text = str(loaded.apply_chat_template(messages, tokenize=False))
    adds_begin = loaded.bos_token_id is not None and loaded("").input_ids[:1] == [loaded.bos_token_id]
    return text.removeprefix(loaded.bos_token) if adds_begin else text


@functools.cache
def load_tokenizer(tokenizer: str) -> Any:
    """Return a tokenizer, loaded once per process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer)
