"""What sets of sequences cost, and how good a finished plan is in numbers that go to the logger.

Position in the flow: lengths and groups -> **costs** -> units -> plan -> **metrics**. Counts tokens and work with
prompts shared or not; decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EMPTY_MICRO_BATCH_TOKENS = 2
"""Tokens of the dummy row (loss weight zero) that a rank runs for an empty micro-batch, so that collective calls
match."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Tokens and work of sets of sequences, with or without shared prompts.

    Attributes:
        tokens: Tokens of each sequence, prompt and response.
        work: Workload of each sequence.
        prompt_tokens: Tokens of each prompt; zeros where prompts are not shared.
        prompt_work: Workload of each prompt; zeros where prompts are not shared.
        group_of: Dense group number of each sequence.
        share_prompts: Sequences of a group in one micro-batch pay for their prompt once.
    """

    tokens: list[int]
    work: list[float]
    prompt_tokens: list[int]
    prompt_work: list[float]
    group_of: list[int]
    share_prompts: bool

    @classmethod
    def measure(
        cls,
        lengths: NDArray[np.int64],
        prompt_lengths: NDArray[np.int64] | None,
        group_of: NDArray[np.int64],
        share_prompts: bool,
        workload: Callable[[NDArray[Any]], NDArray[Any]],
    ) -> Costs:
        """Evaluate the workload once for all sequences; arguments are ``[N]`` and as in `plan_iteration`."""
        shares = share_prompts and prompt_lengths is not None
        prompts = prompt_lengths if shares and prompt_lengths is not None else np.zeros_like(lengths)
        return cls(
            tokens=lengths.tolist(),
            work=np.asarray(workload(lengths)).tolist(),
            prompt_tokens=prompts.tolist(),
            prompt_work=np.asarray(workload(prompts)).tolist() if shares else [0] * len(lengths),
            group_of=group_of.tolist(),
            share_prompts=shares,
        )

    def tokens_of(self, sequences: Sequence[int]) -> int:
        """Tokens that one pass over these sequences computes; a group's shared prompt counts once."""
        return sum(self.tokens[i] for i in sequences) - sum(self.prompt_tokens[i] for i in self._repeats(sequences))

    def work_of(self, sequences: Sequence[int]) -> float:
        """Work of one pass over these sequences; a group's shared prompt counts once."""
        return sum(self.work[i] for i in sequences) - sum(self.prompt_work[i] for i in self._repeats(sequences))

    def _repeats(self, sequences: Sequence[int]) -> list[int]:
        """Sequences whose prompt an earlier one of the same group has paid for."""
        if not self.share_prompts:
            return []
        seen: set[int] = set()
        repeats = []
        for i in sequences:
            if self.group_of[i] in seen:
                repeats.append(i)
            seen.add(self.group_of[i])
        return repeats


def plan_metrics(
    costs: Costs,
    mini_batches: Sequence[Sequence[list[list[int]]]],
    budget: int,
    rank_sequences: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Summarise the micro-batches of all update passes.

    Args:
        costs: Of all sequences.
        mini_batches: Of each mini-batch, over all epochs, ``[rank][micro_batch]`` sequence indices.
        budget: Tokens of a micro-batch.
        rank_sequences: Sequences of each rank.

    Returns:
        Keys, all under ``plan/``:

        - ``token_waste``: tokens computed to no use over useful ones. Useful: every response once, and every prompt
          once per sequence (once per group and mini-batch where prompts are shared). To no use: shared prompts computed
          again because their group is spread over micro-batches, and `EMPTY_MICRO_BATCH_TOKENS` for each empty
          micro-batch.
        - ``fill_ratio``: computed tokens over the budget of all micro-batches, empty ones included.
        - ``rank_imbalance``: work of the busiest rank over that of the mean rank, both summed over mini-batches; 1 is
        perfect.
        - ``max_micro_batch_tokens``: the largest micro-batch.
        - ``num_micro_batches``: per rank, over all epochs; ``num_empty_micro_batches``: over all ranks and epochs.

        And verl's ``global_seqlen/{min,max,minmax_diff,mean,balanced_min,balanced_max}``: sequence tokens of a rank,
        for consecutive slices of the input and as planned.
    """
    computed = useful = 0
    busiest = mean = 0.0
    num_bins = num_empty = longest = num_steps = 0
    for ranks in mini_batches:
        sizes = [costs.tokens_of(one) for bins in ranks for one in bins]
        work = [sum(costs.work_of(one) for one in bins) for bins in ranks]
        computed += sum(sizes)
        useful += costs.tokens_of([i for bins in ranks for one in bins for i in one])
        num_bins += len(sizes)
        num_steps += len(ranks[0])
        num_empty += sum(not one for bins in ranks for one in bins)
        longest = max(longest, max(sizes, default=0))
        busiest, mean = busiest + max(work), mean + sum(work) / len(work)
    return {
        "plan/token_waste": (computed - useful + num_empty * EMPTY_MICRO_BATCH_TOKENS) / useful if useful else 0.0,
        "plan/fill_ratio": computed / (num_bins * budget) if num_bins else 0.0,
        "plan/rank_imbalance": busiest / mean if mean else 1.0,
        "plan/max_micro_batch_tokens": float(longest),
        "plan/num_micro_batches": float(num_steps),
        "plan/num_empty_micro_batches": float(num_empty),
        **_rank_token_sums(costs, rank_sequences),
    }


def _rank_token_sums(costs: Costs, rank_sequences: Sequence[Sequence[int]]) -> dict[str, float]:
    tokens = np.asarray(costs.tokens, dtype=np.int64)
    included = np.sort(np.concatenate([np.asarray(one, dtype=np.int64) for one in rank_sequences]))
    before = [float(tokens[one].sum()) for one in np.array_split(included, len(rank_sequences))]
    after = [float(tokens[np.asarray(one, dtype=np.int64)].sum()) for one in rank_sequences]
    return {
        "global_seqlen/min": min(before),
        "global_seqlen/max": max(before),
        "global_seqlen/minmax_diff": max(before) - min(before),
        "global_seqlen/mean": sum(before) / len(before),
        "global_seqlen/balanced_min": min(after),
        "global_seqlen/balanced_max": max(after),
    }
