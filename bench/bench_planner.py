"""Time of the planner and the tokens its plans waste: log-normal lengths, median 400, sigma 1.0, at most 8,192."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from lit_rl.experience import karmarkar_karp, plan_iteration, sequence_workload

BUDGET = 8192


def lognormal_lengths(count: int) -> np.ndarray:
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.0, count)
    return np.clip(lengths, 1, BUDGET).astype(np.int64)


def best_of(function: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of a few calls: other processes only ever add time."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def run() -> dict[str, float]:
    few, many = lognormal_lengths(8192), lognormal_lengths(65536)
    few_work, many_work = sequence_workload(few), sequence_workload(many)
    plan = plan_iteration(lognormal_lengths(1024), 8, 1, 1, BUDGET, seed=0)
    return {
        "kk_8192_64_s": best_of(lambda: karmarkar_karp(few_work, 64)),
        "kk_65536_64_s": best_of(lambda: karmarkar_karp(many_work, 64)),
        "plan_8192_64_8_s": best_of(lambda: plan_iteration(few, 64, 8, 1, BUDGET, seed=0)),
        "token_waste": plan.metrics["plan/token_waste"],
    }


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value:.4f}")
