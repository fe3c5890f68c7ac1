"""What the planner moves around: one sequence, or a group (or part of one) whose prompt is computed once.

Position in the flow: lengths and groups -> **units** -> mini-batches -> ranks -> micro-batches. Says what a set of sequences
costs in tokens and work, cuts groups into units, and packs the units of each rank into micro-batches. Nothing here chooses a
mini-batch or a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_rl.experience.balance import biggest_in_the_middle, karmarkar_karp, pack_bins, split_bins


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Sequences that are never separated further.

    Attributes:
        sequences: Their indices, ascending.
        tokens: What they cost together; a shared prompt counts once.
        work: Workload of the same.
        bundle: Units of one bundle belong into one mini-batch: the dense group number with shared prompts, else the sequence.
    """

    sequences: list[int]
    tokens: int
    work: float
    bundle: int


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
        shared = prompt_lengths if share_prompts and prompt_lengths is not None else np.zeros_like(lengths)
        return cls(
            tokens=lengths.tolist(),
            work=np.asarray(workload(lengths)).tolist(),
            prompt_tokens=shared.tolist(),
            prompt_work=np.asarray(workload(shared)).tolist() if shared.any() else [0] * len(lengths),
            group_of=group_of.tolist(),
            share_prompts=share_prompts,
        )

    def micro_batch_tokens(self, sequences: Sequence[int]) -> int:
        """Tokens that one forward pass over these sequences computes; a group's shared prompt counts once."""
        total = sum(self.tokens[i] for i in sequences)
        if not self.share_prompts:
            return total
        prompts = {self.group_of[i]: self.prompt_tokens[i] for i in sequences}
        return total - sum(self.prompt_tokens[i] for i in sequences) + sum(prompts.values())

    def unit(self, sequences: Sequence[int]) -> Unit:
        """Join sequences, of one group where prompts are shared, into one unit."""
        first = sequences[0]
        if len(sequences) == 1:
            bundle = self.group_of[first] if self.share_prompts else first
            return Unit(sequences=[first], tokens=self.tokens[first], work=self.work[first], bundle=bundle)
        repeats = len(sequences) - 1
        return Unit(
            sequences=sorted(sequences),
            tokens=sum(self.tokens[i] for i in sequences) - repeats * self.prompt_tokens[first],
            work=sum(self.work[i] for i in sequences) - repeats * self.prompt_work[first],
            bundle=self.group_of[first],
        )


def build_units(
    costs: Costs,
    sequences: Sequence[int],
    budget: int,
    *,
    micro_batch_size: int | None = None,
    fair_work: float = float("inf"),
) -> list[Unit]:
    """Cut sequences into units that fit the budget.

    Without shared prompts each sequence is a unit. With them a group is one, or several where it exceeds the token budget or
    ``micro_batch_size``, or holds at least twice ``fair_work``: each part then pays for the prompt again, which is cheaper than
    idle ranks.

    Args:
        costs: Of all sequences.
        sequences: Those to cut.
        budget: Tokens of a micro-batch.
        micro_batch_size: Most sequences of a micro-batch.
        fair_work: Work of one rank in one mini-batch, if all had the same.
    """
    if not costs.share_prompts:
        return [costs.unit([i]) for i in sequences]
    members: dict[int, list[int]] = {}
    for i in sequences:
        members.setdefault(costs.group_of[i], []).append(i)
    units = []
    for group in members.values():
        whole = costs.unit(group)
        num_parts = int(whole.work / fair_work + 1e-9)
        fits = whole.tokens <= budget and (micro_batch_size is None or len(group) <= micro_batch_size)
        if fits and num_parts < 2:
            units.append(whole)
            continue
        prompt_tokens, prompt_work = costs.prompt_tokens[group[0]], costs.prompt_work[group[0]]
        parts = pack_bins(
            [costs.work[i] - prompt_work for i in group],
            [costs.tokens[i] - prompt_tokens for i in group],
            budget - prompt_tokens,
            min_bins=num_parts,
            max_items=micro_batch_size,
        )
        units.extend(costs.unit([group[i] for i in part]) for part in parts)
    return units


def pack_ranks(
    units_of_rank: list[list[Unit]], budget: int, micro_batch_size: int | None = None
) -> list[list[list[int]]]:
    """Pack the units of each rank into micro-batches, the same number on every rank.

    Args:
        units_of_rank: ``[rank][unit]``.
        budget: Most tokens of a micro-batch.
        micro_batch_size: Where given, consecutive runs of so many sequences (less where the budget asks for it) instead of
            balanced bins.

    Returns:
        ``[rank][micro_batch]`` lists of sequence indices. A rank with fewer units than others have micro-batches gets empty
        ones; the biggest micro-batches are in the middle, so that ranks run similar sizes at the same time.
    """
    packed = []
    for units in units_of_rank:
        if micro_batch_size is None:
            packed.append(pack_bins([unit.work for unit in units], [unit.tokens for unit in units], budget))
        else:
            packed.append(_consecutive_runs(units, budget, micro_batch_size))
    count = max((len(bins) for bins in packed), default=0)
    return [
        _level(units, bins, count, budget, micro_batch_size) for units, bins in zip(units_of_rank, packed, strict=True)
    ]


def _consecutive_runs(units: list[Unit], budget: int, micro_batch_size: int) -> list[list[int]]:
    bins: list[list[int]] = []
    tokens = num_sequences = 0
    for index, unit in enumerate(units):
        tokens, num_sequences = tokens + unit.tokens, num_sequences + len(unit.sequences)
        if not bins or tokens > budget or num_sequences > micro_batch_size:
            bins.append([])
            tokens, num_sequences = unit.tokens, len(unit.sequences)
        bins[-1].append(index)
    return bins


def _level(
    units: list[Unit], bins: list[list[int]], count: int, budget: int, micro_batch_size: int | None
) -> list[list[int]]:
    """Bring one rank to ``count`` micro-batches, order them, and name the sequences in them."""
    work = [unit.work for unit in units]
    if len(bins) < count:
        more = [one for one in karmarkar_karp(work, count) if one] if micro_batch_size is None else []
        if more and all(sum(units[i].tokens for i in one) <= budget for one in more):
            bins = more
        else:
            bins = split_bins(bins, work, count)
    bins = bins + [[] for _ in range(count - len(bins))]
    if micro_batch_size is None:
        bins = biggest_in_the_middle(bins, [sum(work[i] for i in one) for one in bins])
    return [sorted(index for i in one for index in units[i].sequences) for one in bins]
