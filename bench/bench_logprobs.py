"""Compare chunked log-probs with plain ones, forward and backward, float32, one thread: python bench/bench_logprobs.py.

16,384 tokens, hidden size 576, vocabulary 49,152 (SmolLM2's). The plain way needs about 13 GB, and each call half a
minute.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import time
from collections.abc import Callable

import psutil
import torch
from torch import Tensor

from lit_rl.models.token_logprobs import token_logprobs

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 16384, 576, 49152
REPEATS = 2


def run() -> dict[str, float]:
    """Return peak memory above the inputs in GB, gradients included, and the ratio of median CPU times.

    CPU time, since with one thread it is what the wall clock shows on an idle machine, and other work does not distort
    it.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, requires_grad=True)
    weight = (0.05 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE)).requires_grad_()
    targets = torch.randint(VOCAB_SIZE, (NUM_TOKENS,))
    upstream = torch.randn(NUM_TOKENS)

    def backward(logprobs: Tensor) -> None:
        logprobs.backward(upstream)
        hidden.grad = weight.grad = None

    def chunked() -> None:
        logprobs = token_logprobs(hidden, weight, targets)
        assert isinstance(logprobs, Tensor)
        backward(logprobs)

    def plain() -> None:
        backward((hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0])

    # Memory first: a process's peak never falls again.
    extra_gb = _extra_gb(chunked)
    times: dict[Callable[[], None], list[float]] = {plain: [], chunked: []}
    for _ in range(REPEATS):
        for function, seconds in times.items():
            start = time.process_time()
            function()
            seconds.append(time.process_time() - start)
    ratio = statistics.median(times[chunked]) / statistics.median(times[plain])
    return {"logprob_extra_gb": extra_gb, "logprob_vs_plain_time_ratio": ratio}


def _extra_gb(function: Callable[[], None]) -> float:
    gc.collect()
    before = psutil.Process().memory_info().rss
    function()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e9


if __name__ == "__main__":
    print(json.dumps(run()))
