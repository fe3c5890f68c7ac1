"""What a validation says about the policy: means over rows, and the chance that one of k samples is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from lit_rl.metrics.rollout import part_means
from lit_rl.types import Trajectory


def evaluation_metrics(data_source: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Summarise one data source. Every row counts once, however many samples of it succeeded.

    ``val-core/<source>/reward/mean@k`` is the mean reward, with k samples of each row; ``pass@j`` the chance that the
    best of j samples has a reward above 0.5, without bias (arXiv:2107.03374, eq. 1); ``val-aux/<source>/<part>/mean``
    the mean of each reward part. Failed trajectories are in no mean; their share is ``val-aux/<source>/failed_share``.

    Args:
        data_source: Name in the keys.
        trajectories: Of this source.
    """
    usable = [trajectory for trajectory in trajectories if not trajectory.has_failed]
    metrics = {f"val-aux/{data_source}/failed_share": 1 - len(usable) / max(len(trajectories), 1)}
    if not usable:
        return metrics
    rows: dict[str, list[float]] = {}
    for trajectory in usable:
        rows.setdefault(trajectory.row_id, []).append(float(trajectory.reward or 0.0))
    # Failed ones count here: a name must not change because a sample failed.
    samples = max(Counter(trajectory.row_id for trajectory in trajectories).values())
    means = [sum(rewards) / len(rewards) for rewards in rows.values()]
    metrics[f"val-core/{data_source}/reward/mean@{samples}"] = sum(means) / len(means)
    size = 2
    while size <= samples:
        chances = [pass_at_k(rewards, size) for rewards in rows.values() if len(rewards) >= size]
        if chances:
            metrics[f"val-core/{data_source}/reward/pass@{size}"] = sum(chances) / len(chances)
        size *= 2
    metrics |= part_means(f"val-aux/{data_source}", usable)
    lengths = [len(trajectory.response_ids) for trajectory in usable]
    metrics[f"val-aux/{data_source}/response_length/mean"] = sum(lengths) / len(lengths)
    return metrics


def pass_at_k(rewards: Sequence[float], k: int, threshold: float = 0.5) -> float:
    """Unbiased estimate of the chance that the best of ``k`` samples passes: ``1 - C(n - c, k) / C(n, k)``.

    Args:
        rewards: Of the n samples of one row, ``n >= k``.
        k: Samples drawn without replacement.
        threshold: A reward above it passes.
    """
    n, passed = len(rewards), sum(reward > threshold for reward in rewards)
    return 1.0 - comb(n - passed, k) / comb(n, k)
