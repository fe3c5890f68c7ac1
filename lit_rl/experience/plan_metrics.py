"""How good a plan is, in numbers that go to the logger.

Position in the flow: finished mini-batch plans -> **metrics**. Reads a plan, changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lit_rl.experience.plan_units import Costs

EMPTY_MICRO_BATCH_TOKENS = 2
"""Tokens of the dummy row that a rank runs for an empty micro-batch, so that collective calls match (loss weight zero)."""


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

        - ``token_waste``: tokens computed to no use over useful ones. Useful: every response once and every prompt once (once per
          group of a mini-batch where prompts are shared). To no use: repeated prompts of shared-prompt groups that are
          spread over several micro-batches, and `EMPTY_MICRO_BATCH_TOKENS` for each empty micro-batch.
        - ``fill_ratio``: computed tokens over the budget of all micro-batches, empty ones included.
        - ``rank_imbalance``: work of the busiest rank over that of the mean one, summed over mini-batches; 1 is perfect.
        - ``max_micro_batch_tokens``, ``num_micro_batches`` (per rank, over all epochs), ``num_empty_micro_batches`` (all ranks).

        And verl's ``global_seqlen/{min,max,minmax_diff,mean,balanced_min,balanced_max}``: token sums of ranks, for consecutive
        slices and as planned.
    """
    computed = useful = busiest = mean = 0.0
    num_bins = num_empty = longest = num_steps = 0
    for ranks in mini_batches:
        sizes = [[costs.micro_batch_tokens(one) for one in bins] for bins in ranks]
        flat = [size for rank in sizes for size in rank]
        computed += sum(flat)
        useful += costs.micro_batch_tokens([i for bins in ranks for one in bins for i in one])
        num_bins += len(flat)
        num_steps += len(sizes[0])
        num_empty += sum(not one for bins in ranks for one in bins)
        longest = max(longest, max(flat, default=0))
        work = [sum(costs.work[i] for one in bins for i in one) for bins in ranks]
        busiest, mean = busiest + max(work), mean + sum(work) / len(work)
    return {
        "plan/token_waste": (computed - useful + num_empty * EMPTY_MICRO_BATCH_TOKENS) / useful if useful else 0.0,
        "plan/fill_ratio": computed / (num_bins * budget) if num_bins and budget else 0.0,
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
