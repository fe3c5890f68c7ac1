"""What a validation says about the policy: means over rows, and what the best of k samples is worth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb

from lit_rl.metrics.rollout import part_means
from lit_rl.types import Trajectory


def evaluation_metrics(data_source: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Summarise one data source. Every row counts once, however many samples of it succeeded.

    ``val-core/<source>/reward/mean@k`` is the mean reward, with k samples of each row; ``pass@j`` the chance that the
    best of j samples has a reward above 0.5, without bias (arXiv:2107.03374, eq. 1), for j = 2, 4, ... up to k.
    ``best@j/mean`` and ``worst@j/mean`` are the expected best and worst reward of j samples, in place of verl's
    bootstrap and exact; of these only ``best@k`` is in ``val-core``. ``val-aux/<source>/<part>/mean`` is the mean of
    each reward part. Failed trajectories are in no mean; their share is ``val-aux/<source>/failed_share``.

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
        metrics |= _of_draws(data_source, [rewards for rewards in rows.values() if len(rewards) >= size], size, samples)
        size *= 2
    metrics |= part_means(f"val-aux/{data_source}", usable)
    lengths = [len(trajectory.response_ids) for trajectory in usable]
    metrics[f"val-aux/{data_source}/response_length/mean"] = sum(lengths) / len(lengths)
    return metrics


def _of_draws(data_source: str, rows: Sequence[Sequence[float]], size: int, samples: int) -> dict[str, float]:
    """Means over rows of what ``size`` of their samples are worth together; nothing where no row has so many."""
    if not rows:
        return {}
    core, aux = f"val-core/{data_source}/reward", f"val-aux/{data_source}/reward"
    return {
        f"{core}/pass@{size}": sum(pass_at_k(rewards, size) for rewards in rows) / len(rows),
        f"{core if size == samples else aux}/best@{size}/mean": sum(best_at_k(row, size) for row in rows) / len(rows),
        f"{aux}/worst@{size}/mean": -sum(best_at_k([-reward for reward in row], size) for row in rows) / len(rows),
    }


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Unbiased estimate of the expected best reward of ``k`` samples.

    The i-th smallest of n rewards is the best of ``C(i - 1, k - 1)`` of the ``C(n, k)`` draws.

    Args:
        rewards: Of the n samples of one row, ``n >= k``.
        k: Samples drawn without replacement.
    """
    draws = comb(len(rewards), k)
    return sum(reward * (comb(i, k - 1) / draws) for i, reward in enumerate(sorted(rewards)))


def pass_at_k(rewards: Sequence[float], k: int, threshold: float = 0.5) -> float:
    """Unbiased estimate of the chance that the best of ``k`` samples passes: ``1 - C(n - c, k) / C(n, k)``.

    Args:
        rewards: Of the n samples of one row, ``n >= k``.
        k: Samples drawn without replacement.
        threshold: A reward above it passes.
    """
    n, passed = len(rewards), sum(reward > threshold for reward in rewards)
    return 1.0 - comb(n - passed, k) / comb(n, k)
