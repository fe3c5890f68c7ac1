"""Turn whatever a tool function returned into a response, a reward and metrics.

Position in the flow: FunctionTool.call -> **normalisation** -> ToolSession. Raises where a value has no sensible
reading; the session turns that into an error text for the policy.
"""

from __future__ import annotations

import json
from typing import Any

from lit_rl.tools.schemas import ToolResponse

ToolReturn = tuple[ToolResponse, float, dict[str, Any]]
"""Response shown to the policy, step reward, and metrics."""


def normalize_function_tool_return(value: Any) -> ToolReturn:
    """Return response, reward and metrics for a function tool's return value.

    ``(response,)``, ``(response, reward)`` and ``(response, reward, metrics)`` are taken apart; anything else is the
    response alone, with reward 0.0 and no metrics. A reward or metrics of ``None`` count as 0.0 and empty. Responses
    become text: strings as they are, dicts and lists as JSON with readable unicode, bytes decoded as UTF-8, ``None``
    as the empty text, everything else through ``str``.

    Raises:
        TypeError: For a tuple of another length, a dict that JSON cannot encode, or a reward that is no number.
        ValueError: For a reward text that is no number, or metrics that are no mapping.
    """
    if not isinstance(value, tuple):
        return _to_response(value), 0.0, {}
    if not 1 <= len(value) <= 3:
        raise TypeError(
            f"A tool returned a tuple of length {len(value)}: return a response, (response, reward), "
            "or (response, reward, metrics)."
        )
    reward = 0.0 if len(value) < 2 or value[1] is None else float(value[1])
    metrics = {} if len(value) < 3 or value[2] is None else dict(value[2])
    return _to_response(value[0]), reward, metrics


def _to_response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        return value
    return ToolResponse(text=_to_text(value))


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(value)
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", errors="replace")
    return str(value)
