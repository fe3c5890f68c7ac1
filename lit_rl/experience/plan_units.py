"""Units of planning: cut from groups, dealt to mini-batches and ranks, packed into micro-batches.

Position in the flow: lengths and groups -> costs -> **units** -> plan. A unit is one sequence, or a group (or part of
one) whose prompt is computed once. The only randomness of the planner is here, from generators that are passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lit_rl.experience.balance import biggest_in_the_middle, karmarkar_karp, pack_bins, split_bins
from lit_rl.experience.plan_costs import Costs


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Sequences that are never separated further.

    Attributes:
        sequences: Their indices, ascending.
        tokens: What they cost together; a shared prompt counts once.
        work: Workload of the same.
        bundle: Units of one bundle go into one mini-batch. The group with shared prompts, else the sequence itself.
    """

    sequences: list[int]
    tokens: int
    work: float
    bundle: int


Pass = list[list[list[Unit]]]
"""Units of one pass over the experience, ``[mini_batch][rank][unit]``."""


def _join(costs: Costs, sequences: Sequence[int]) -> Unit:
    first = sequences[0]
    return Unit(
        sequences=sorted(sequences),
        tokens=costs.tokens_of(sequences),
        work=costs.work_of(sequences),
        bundle=costs.group_of[first] if costs.share_prompts else first,
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

    Without shared prompts each sequence is a unit. With them a group is one, or several where it exceeds the token
    budget or ``micro_batch_size``, or is so large that ranks would wait for it: parts then hold about half of
    ``fair_work``, or up to all of it where that is less than ten prompts, because each part pays for the prompt again.

    Args:
        costs: Of all sequences.
        sequences: Those to cut.
        budget: Tokens of a micro-batch.
        micro_batch_size: Most sequences of a micro-batch.
        fair_work: Work of one rank in one mini-batch, if all had the same.
    """
    if not costs.share_prompts:
        return [_join(costs, [i]) for i in sequences]
    members: dict[int, list[int]] = {}
    for i in sequences:
        members.setdefault(costs.group_of[i], []).append(i)
    units = []
    for group in members.values():
        whole = _join(costs, group)
        prompt_tokens, prompt_work = costs.prompt_tokens[group[0]], costs.prompt_work[group[0]]
        num_parts = int(whole.work / max(fair_work / 2, min(fair_work, 10 * prompt_work)) + 1e-9)
        fits = whole.tokens <= budget and (micro_batch_size is None or len(group) <= micro_batch_size)
        if fits and num_parts < 2:
            units.append(whole)
            continue
        parts = pack_bins(
            [costs.work[i] - prompt_work for i in group],
            [costs.tokens[i] - prompt_tokens for i in group],
            budget - prompt_tokens,
            min_bins=num_parts,
            max_items=micro_batch_size,
        )
        units.extend(_join(costs, [group[i] for i in part]) for part in parts)
    return units


def pack_ranks(
    units_of_rank: list[list[Unit]], budget: int, micro_batch_size: int | None = None
) -> list[list[list[int]]]:
    """Pack the units of each rank into micro-batches, the same number on every rank.

    Args:
        units_of_rank: ``[rank][unit]``.
        budget: Most tokens of a micro-batch.
        micro_batch_size: Where given, consecutive runs of so many sequences (less where the budget asks for it) instead
            of balanced bins.

    Returns:
        ``[rank][micro_batch]`` lists of sequence indices. A rank with fewer units than others have micro-batches gets
        empty ones; the biggest micro-batches are in the middle, so that ranks run similar sizes at the same time.
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


def deal_first_pass(
    bundles: list[list[Unit]], world_size: int, num_mini_batches: int, rng: np.random.Generator | None
) -> Pass:
    """Deal bundles to mini-batches and the units of each mini-batch to ranks.

    Args:
        bundles: Units that stay in one mini-batch together, in the order of the input.
        world_size: Ranks.
        num_mini_batches: Mini-batches; their numbers of bundles differ by at most one.
        rng: Composes mini-batches at random; ``None`` takes consecutive runs of the input.
    """
    if rng is None:
        runs = np.array_split(np.arange(len(bundles)), num_mini_batches)
        mini_of = np.repeat(np.arange(num_mini_batches), [len(run) for run in runs])
    else:
        mini_of = _deal_evenly(_bundle_work(bundles), num_mini_batches, rng)
    load = [0.0] * world_size
    dealt: Pass = []
    for mini in range(num_mini_batches):
        units = [unit for i in np.flatnonzero(mini_of == mini).tolist() for unit in bundles[i]]
        shares = karmarkar_karp([unit.work for unit in units], world_size)
        cells: list[list[Unit]] = [[] for _ in range(world_size)]
        # Shares come heaviest first and go to the ranks that have least so far: this levels the scoring passes.
        for rank, share in zip(sorted(range(world_size), key=load.__getitem__), shares, strict=True):
            cells[rank] = [units[i] for i in share]
            load[rank] += sum(unit.work for unit in cells[rank])
        dealt.append(cells)
    return dealt


def deal_later_pass(first: Pass, bundles: list[list[Unit]], rng: np.random.Generator) -> Pass:
    """Compose mini-batches anew while every unit stays on the rank that the first pass gave it.

    Bundles of several units are dealt as a whole; then each rank deals its other units. Work comes first there and
    numbers of units are evened out afterwards, because equal numbers on every rank would leave heavy units no room.
    """
    num_mini_batches, world_size = len(first), len(first[0])
    cells: Pass = [[[] for _ in range(world_size)] for _ in range(num_mini_batches)]
    rank_of = {id(unit): rank for ranks in first for rank, units in enumerate(ranks) for unit in units}
    counts = np.zeros(num_mini_batches, dtype=np.int64)
    spread = [bundle for bundle in bundles if len(bundle) > 1]
    for bundle, mini in zip(spread, _deal_evenly(_bundle_work(spread), num_mini_batches, rng).tolist(), strict=True):
        counts[mini] += 1
        for unit in bundle:
            cells[mini][rank_of[id(unit)]].append(unit)
    single: list[list[Unit]] = [[] for _ in range(world_size)]
    for bundle in bundles:
        if len(bundle) == 1:
            single[rank_of[id(bundle[0])]].append(bundle[0])
    movable: list[list[list[Unit]]] = []
    for rank, units in enumerate(single):
        loads = [sum(unit.work for unit in cells[mini][rank]) for mini in range(num_mini_batches)]
        parts = _deal_by_work(units, loads, rng)
        if not any(loads):
            # Parts of one rank weigh the same, so which mini-batch gets which is free: use it to even out the counts.
            fullest = sorted(parts, key=len, reverse=True)
            for part, mini in zip(fullest, np.lexsort((rng.random(num_mini_batches), counts)).tolist(), strict=True):
                parts[mini] = part
        counts += [len(part) for part in parts]
        movable.append(parts)
    _even_counts(movable, counts)
    for rank, parts in enumerate(movable):
        for mini, part in enumerate(parts):
            cells[mini][rank].extend(part)
    return cells


def _bundle_work(bundles: list[list[Unit]]) -> NDArray[np.float64]:
    return np.asarray([sum(unit.work for unit in bundle) for bundle in bundles], dtype=np.float64)


def _deal_evenly(work: NDArray[np.float64], num_parts: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Deal ``[n]`` items to parts at random, with equal counts and nearly equal work; returns the part of each.

    Items of similar work form strata of one item per part. The half of the strata whose items differ least is dealt at
    random; the others, widest first, give their heaviest item to the part that has least. The lightest items are left
    over.
    """
    part_of = np.zeros(len(work), dtype=np.int64)
    loads = np.zeros(num_parts)
    # Shuffled first, so that items of equal work can meet in one part.
    order = rng.permutation(len(work))
    order = order[np.argsort(-work[order], kind="stable")]
    strata = order[: len(work) // num_parts * num_parts].reshape(-1, num_parts)
    by_spread = np.argsort(work[strata[:, 0]] - work[strata[:, -1]], kind="stable")
    half = len(strata) // 2
    for row in by_spread[:half]:
        members = rng.permutation(strata[row])
        part_of[members] = np.arange(num_parts)
        loads += work[members]
    for row in by_spread[half:][::-1]:
        parts = np.lexsort((rng.random(num_parts), loads))
        part_of[strata[row]] = parts
        loads[parts] += work[strata[row]]
    rest = order[strata.size :]
    part_of[rest] = np.lexsort((rng.random(num_parts), loads))[: len(rest)]
    return part_of


def _deal_by_work(units: list[Unit], loads: list[float], rng: np.random.Generator) -> list[list[Unit]]:
    """Deal the lighter half of the units at random, then the others, heaviest first, to the part that has least."""
    num_parts = len(loads)
    light_first = sorted(rng.permutation(len(units)).tolist(), key=lambda i: units[i].work)
    half = len(units) // 2
    parts: list[list[Unit]] = [[] for _ in range(num_parts)]
    loads = list(loads)
    turn = rng.permutation(num_parts).tolist()
    for position, i in enumerate(rng.permutation(light_first[:half]).tolist()):
        part = turn[position % num_parts]
        parts[part].append(units[i])
        loads[part] += units[i].work
    heap = [(load, tie, part) for load, tie, part in zip(loads, turn, range(num_parts), strict=True)]
    heapq.heapify(heap)
    for i in reversed(light_first[half:]):
        load, tie, part = heap[0]
        parts[part].append(units[i])
        heapq.heapreplace(heap, (load + units[i].work, tie, part))
    return parts


def _even_counts(parts_of_rank: list[list[list[Unit]]], counts: NDArray[np.int64]) -> None:
    """Move the lightest units, each within its rank, until mini-batch counts differ by at most one.

    Leaves a larger difference only where it comes from groups that are spread over ranks.
    """
    while counts.max() - counts.min() > 1:
        over, under = int(counts.argmax()), int(counts.argmin())
        givers = [parts for parts in parts_of_rank if parts[over]]
        if not givers:
            return
        parts = max(givers, key=lambda one: _work(one[over]) - _work(one[under]))
        lightest = min(parts[over], key=lambda unit: (unit.work, unit.sequences))
        parts[over].remove(lightest)
        parts[under].append(lightest)
        counts[over] -= 1
        counts[under] += 1


def _work(units: list[Unit]) -> float:
    return sum(unit.work for unit in units)
