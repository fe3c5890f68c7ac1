"""Ask a reward model or judge behind an HTTP address: JSON in, JSON out, one deadline over all attempts.

Used by `reward_model` (sequence classifiers) and `judge` (generative). The servers are started elsewhere, by
``vllm serve`` for one. What cannot be answered raises, so that scoring fails and is not a score of 0.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

_TRIED_AGAIN = (429, 500, 502, 503, 504)
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_SHOWN_CHARS = 300


class RewardServerError(RuntimeError):
    """The server could not be reached, or its answer cannot be used."""


async def post_json(url: str, body: dict[str, Any], *, timeout_s: float, api_key_variable: str | None = None) -> Any:
    """Return the decoded answer to a POST.

    Busy and failing servers are asked again with growing pauses until the time is up.

    Args:
        url: Full address.
        body: JSON body.
        timeout_s: For all attempts together.
        api_key_variable: Environment variable with a bearer token.

    Raises:
        RewardServerError: With address and reason.
    """
    import aiohttp

    headers = {}
    if api_key_variable is not None:
        if api_key_variable not in os.environ:
            raise RewardServerError(f"{url}: the environment variable {api_key_variable} is not set.")
        headers["Authorization"] = f"Bearer {os.environ[api_key_variable]}"
    reason = "no attempt ended"
    pause_s = _FIRST_PAUSE_S
    try:
        async with asyncio.timeout(timeout_s):
            async with aiohttp.ClientSession(headers=headers) as session:
                while True:
                    try:
                        async with session.post(url, json=body) as reply:
                            text = await reply.text()
                            if reply.status == 200:
                                return json.loads(text)
                            reason = f"HTTP {reply.status}: {text[:_SHOWN_CHARS]}"
                            if reply.status not in _TRIED_AGAIN:
                                raise RewardServerError(f"{url}: {reason}")
                    except aiohttp.ClientError as error:
                        reason = f"{type(error).__name__}: {error}"
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    except TimeoutError as error:
        raise RewardServerError(f"{url}: no answer within {timeout_s:g} s ({reason}).") from error
    except ValueError as error:
        raise RewardServerError(f"{url}: the answer is no JSON.") from error
