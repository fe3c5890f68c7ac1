"""Time the heaviest algorithm functions on one thread: python bench/bench_algorithms.py."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from lit_rl.algorithms.advantages import gae, group_relative
from lit_rl.algorithms.aggregate import aggregate_loss
from lit_rl.algorithms.policy_losses import clipped_policy_loss

NUM_ROWS, NUM_TOKENS, NUM_SCALARS, GROUP_SIZE = 1024, 2048, 8192, 8


def best_of(function: Callable[[], object], repeats: int = 7) -> float:
    """Return the shortest time of one call, seconds, after one call to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def run() -> dict[str, float]:
    """Return seconds by key: float32, one thread, sizes of the constants above."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(torch.Generator().manual_seed(0))
    finally:
        torch.set_num_threads(num_threads)


def _measure(generator: torch.Generator) -> dict[str, float]:
    shape = (NUM_ROWS, NUM_TOKENS)
    rewards = torch.rand(NUM_SCALARS, generator=generator)
    group_ids = torch.arange(NUM_SCALARS) // GROUP_SIZE
    old_logprobs = -torch.rand(shape, generator=generator)
    logprobs = (old_logprobs + 0.1 * torch.randn(shape, generator=generator)).requires_grad_()
    advantages = torch.randn(NUM_ROWS, 1, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.8  # observation tokens anywhere
    num_tokens = float(mask.sum())
    values = torch.randn(shape, generator=generator)
    token_rewards = torch.zeros(shape)
    token_rewards[:, -1] = 1.0

    def policy_step() -> None:
        logprobs.grad = None
        loss = clipped_policy_loss(logprobs, old_logprobs, advantages)
        aggregate_loss(loss, mask, num_tokens=num_tokens, num_sequences=NUM_ROWS).backward()

    return {
        "group_relative_s": best_of(lambda: group_relative(rewards, group_ids)),
        "policy_loss_s": best_of(policy_step),
        "gae_s": best_of(lambda: gae(token_rewards, values, mask, gamma=0.99, lam=0.95)),
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
