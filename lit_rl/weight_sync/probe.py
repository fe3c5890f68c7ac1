"""Compare what the replicas compute with what the trainer computes, on a few short sequences after a weight sync.

Checksums prove that the right bytes arrived, not that the engine multiplies with them: vLLM's CPU build once kept the
packed copy of a tied output head that it had made from the first policy. Log-probs see such a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lit_rl.serving import LLMServerManager
from lit_rl.types import ScoreOutput


@dataclass(kw_only=True)
class ProbeGaps:
    """Differences between log-probs of the same tokens, in nats per token.

    Attributes:
        by_replica: Mean absolute difference of each replica from the trainer.
        largest: Largest absolute difference of a replica from the trainer at any token.
        between_replicas: Mean, over the tokens, of the spread between the replicas; 0 with one replica.
        num_tokens: Tokens compared.
    """

    by_replica: dict[str, float]
    largest: float
    between_replicas: float
    num_tokens: int

    @property
    def worst(self) -> float:
        """Mean absolute difference of the worst replica; NaN if a replica computes any."""
        # max() overlooks NaN unless it comes first.
        return max(self.by_replica.values(), key=lambda gap: float("inf") if gap != gap else gap)

    def metrics(self) -> dict[str, float]:
        """Numbers to log."""
        return {
            "weight_sync/probe_gap_mean": self.worst,
            "weight_sync/probe_gap_max": self.largest,
            "weight_sync/probe_replica_gap_mean": self.between_replicas,
        }

    def describe(self) -> str:
        """The numbers as one sentence, with what they point at."""
        gaps = ", ".join(f"{name} {gap:.4f}" for name, gap in self.by_replica.items())
        told = f"mean gap between trainer and engine over {self.num_tokens} tokens: {gaps} nats per token"
        if len(self.by_replica) < 2:
            return told
        if self.between_replicas > 0.5 * self.worst:
            return f"{told}; the replicas differ among themselves by {self.between_replicas:.4f}: one of them is wrong"
        return f"{told}; the replicas agree among themselves: the engine computes otherwise than the trainer"


async def ask_replicas(
    servers: LLMServerManager, sequences: Sequence[Sequence[int]], version: int
) -> dict[str, list[ScoreOutput]]:
    """Have every replica score every token but the first of each sequence, at temperature 1.

    Raises:
        RuntimeError: If a replica answers with another version of the policy than ``version``.
    """
    answers = await servers.score([(list(ids[:1]), list(ids[1:])) for ids in sequences])
    others = {name: outputs[0].policy_version for name, outputs in answers.items()}
    if set(others.values()) != {version}:
        raise RuntimeError(f"Weight sync: after the update to version {version} the replicas score with {others}.")
    return answers


def compare(trainer: Sequence[Sequence[float]], replicas: dict[str, list[ScoreOutput]]) -> ProbeGaps:
    """Return how far the replicas' log-probs are from the trainer's and from each other.

    Args:
        trainer: Log-probs of each sequence's tokens in nats.
        replicas: The same of each replica.
    """
    expected = [logprob for row in trainer for logprob in row]
    columns = {name: [logprob for row in rows for logprob in row.logprobs] for name, rows in replicas.items()}
    gaps = {
        name: [abs(given - wanted) for given, wanted in zip(column, expected, strict=True)]
        for name, column in columns.items()
    }
    return ProbeGaps(
        by_replica={name: fmean(of_replica) for name, of_replica in gaps.items()},
        largest=max(gap for of_replica in gaps.values() for gap in of_replica),
        between_replicas=fmean(max(token) - min(token) for token in zip(*columns.values(), strict=True)),
        num_tokens=len(expected),
    )
