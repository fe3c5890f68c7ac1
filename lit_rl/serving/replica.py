"""What every inference engine offers, whatever runs inside.

A replica is a worker: its methods are called through a `WorkerHandle`, in another process (Ray) or in this one
(inline). Batching belongs to the engine: agent loops send one request per turn, the engine batches continuously.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from lit_rl.types import SamplingParams, ScoreOutput, TokenOutput

INITIAL_VERSION = -1
"""Policy version of a replica that still holds the weights it was started with, before the first sync."""


@dataclass(kw_only=True)
class WeightReport:
    """What a replica says about a finished weight update.

    Attributes:
        version: Policy version the replica now holds.
        bytes_received: Bytes received under each name.
        unused_names: Names that were sent and that no parameter of the engine consumed.
        checksum: Digest over all loaded parameters; equal on every replica that holds the same weights.
    """

    version: int
    bytes_received: dict[str, int] = field(default_factory=dict)
    unused_names: list[str] = field(default_factory=list)
    checksum: str = ""


def check_score_request(
    prompt_ids: list[int], response_ids: list[int], temperature: float, top_k: int, max_tokens: int
) -> None:
    """Raise ``ValueError`` where `Replica.score` is asked for what no engine can do.

    Args:
        prompt_ids: See `Replica.score`, as the next three.
        response_ids: The tokens to score.
        temperature: Divides the logits.
        top_k: Most likely tokens asked for.
        max_tokens: Most tokens of prompt and response together that the engine takes.
    """
    if not prompt_ids:
        raise ValueError("score() needs a prompt of at least one token: a sequence's first token has no log-prob.")
    if len(prompt_ids) + len(response_ids) > max_tokens:
        raise ValueError(
            f"score() got {len(prompt_ids)} + {len(response_ids)} tokens, but the engine takes {max_tokens}. Raise "
            "max_model_len of its serving settings."
        )
    if not temperature > 0:
        raise ValueError(f"score(temperature={temperature}): must be above 0; a greedy policy has no log-probs.")
    if top_k < 0:
        raise ValueError(f"score(top_k={top_k}): must be at least 0.")


class Replica(Protocol):
    """The protocol of one inference engine."""

    async def start(self) -> None:
        """Load the model; raise with the engine's own message when that fails."""

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        """Sample one response.

        Raises:
            ValueError: If the prompt leaves no room for a single token (a fault of the data, not of the replica).
        """

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], request_id: str, temperature: float = 1.0, top_k: int = 0
    ) -> ScoreOutput:
        """Return the log-probs of given tokens, with every token of the vocabulary a candidate.

        Args:
            prompt_ids: What comes before them, at least one token.
            response_ids: The tokens to score.
            request_id: Unique in the engine.
            temperature: Divides the logits; above 0. An engine that cannot do other than 1 refuses the others.
            top_k: Also return that many most likely tokens at each place.

        Raises:
            ValueError: If the request cannot be scored, however often it is tried.
        """

    async def abort(self, request_id: str) -> None:
        """End one request; its caller gets what was sampled so far, stop reason ``abort``. Unknown ids are ignored."""

    async def pause(self) -> None:
        """Freeze generation; requests in flight are kept."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def sleep(self) -> None:
        """Give back accelerator memory; a no-op where the engine has its own."""

    async def wake(self) -> None:
        """Take the memory of `sleep` back."""

    async def start_weight_update(self) -> None:
        """Begin a weight update; generation must be paused."""

    async def update_weights(self, bucket: dict[str, Any]) -> None:
        """Load one bucket: ``{"path": file, "names": [...]}`` of full tensors under Hugging Face names."""

    async def finish_weight_update(self, version: int) -> WeightReport:
        """End the update: drop every cached prefix, take ``version``, and report what was loaded."""

    async def health(self) -> dict[str, Any]:
        """Version, and whether the engine still answers."""

    async def close(self) -> None:
        """Stop the engine and its processes."""
