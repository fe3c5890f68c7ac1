"""Values in Ray's object store, for those who hand references on themselves.

A reference belongs into a list when it is an argument of a call: bare, it would arrive as its value. It must not be
pickled in any other way. Importing this module imports no Ray.
"""

from __future__ import annotations

import asyncio
from typing import Any


def put_object(value: Any) -> Any:
    """Copy a value into the object store and return a reference to it; arrays are laid down as they are."""
    from lit_rl.cluster.ray_backend import put

    return put(value)


async def fetch_object(reference: Any, *, timeout_s: float, what: str) -> Any:
    """Return the value of a reference. Its arrays are read-only and stay in the store while somebody holds them.

    Args:
        reference: From `put_object`, in this process or another one of the cluster.
        timeout_s: Longest wait in seconds.
        what: What is fetched, for the error.

    Raises:
        TimeoutError: After ``timeout_s`` seconds; says ``what``.
        WorkerDied: The process that put it is gone.
    """
    from lit_rl.cluster.handle import WorkerDied
    from lit_rl.cluster.ray_backend import GONE

    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await reference
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"Timed out after {timeout_s:g} s: {what} from the object store.") from None
    except GONE as error:
        raise WorkerDied("object store", str(error).strip().splitlines()[0]) from error
