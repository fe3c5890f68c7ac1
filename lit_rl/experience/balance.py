"""Divide costs over bins: Karmarkar-Karp, token budgets, orders.

Position in the flow: lengths -> workloads -> **bins** -> plan -> micro-batches. Pure arithmetic on lists of numbers:
nothing here knows of ranks, epochs, tensors or devices, and nothing draws random numbers.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

# One set of a partition while it is being built: (sum, number of items, first item, node in the merge forest). Sets
# that live at the same time are disjoint, so no two compare equal and the order is total.
_Set = tuple[Any, int, int, int]


@overload
def sequence_workload(length: int, linear: int = ...) -> int: ...
@overload
def sequence_workload(length: NDArray[Any], linear: int = ...) -> NDArray[np.int64]: ...
def sequence_workload(length: int | NDArray[Any], linear: int = 24576) -> int | NDArray[np.int64]:
    """Return the relative cost of one transformer pass over a sequence: ``linear * s + s * s``.

    The first term is the matrix products of a block, the second attention. Derived from ``12 h^2 s + 2 h s^2`` by
    dividing by ``2 h``, so ``linear`` is 6 times the hidden size; the default is that of a hidden size of 4096.

    Args:
        length: Tokens, a number or an integer array.
        linear: Weight of the part that grows linearly; ``6 * hidden_size`` for a standard block.

    Returns:
        Work in 64-bit integers, of the shape of ``length``. No physical unit: only ratios matter.
    """
    if isinstance(length, np.ndarray):
        tokens = length.astype(np.int64)
        return tokens * linear + tokens * tokens
    return linear * int(length) + int(length) * int(length)


def karmarkar_karp(workloads: Sequence[float] | NDArray[Any], k: int, equal_size: bool = False) -> list[list[int]]:
    """Divide items into ``k`` sets of nearly equal sum by the largest differencing method.

    A state is ``k`` sets. Of all states the two whose largest and smallest sets differ most are merged, the largest set
    of one with the smallest of the other, until one state is left. Deterministic: ties go by number of items, then by
    the first item. A state keeps its non-empty sets only, so that folding in one more item costs a binary search.

    Args:
        workloads: ``[N]`` non-negative numbers, usually of `sequence_workload`.
        k: Number of sets, at least 1.
        equal_size: Every set gets exactly ``N / k`` items, at the price of a larger spread.

    Returns:
        ``k`` lists of indices, each ascending, the set with the largest sum first. Together every index once. With
        fewer items than sets the last ones are empty.

    Raises:
        ValueError: If ``k`` is below 1, or ``equal_size`` is asked for and ``N`` is not a multiple of ``k``.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", UCB/CSD 82/113, 1982.
    """
    values: list[Any] = np.asarray(workloads).tolist()
    if k < 1:
        raise ValueError(f"karmarkar_karp: k={k} sets; at least 1 is needed.")
    if equal_size and len(values) % k:
        raise ValueError(
            f"karmarkar_karp: {len(values)} items do not divide into {k} sets of equal size. "
            f"Use equal_size=False, or pass a multiple of {k} items."
        )
    if k == 1 or not values:
        return [list(range(len(values)))] + [[] for _ in range(k - 1)]
    ascending = sorted(range(len(values)), key=values.__getitem__)
    forest = _MergeForest(len(values))
    if equal_size:
        runs = [[(values[i], 1, i, i) for i in ascending[start : start + k]] for start in range(0, len(ascending), k)]
        final = _difference([], runs, k, forest)
    else:
        final = _difference([(values[i], 1, i, i) for i in ascending], [], k, forest)
    sets = [forest.items(one[3]) for one in reversed(final)]
    return sets + [[] for _ in range(k - len(sets))]


class _MergeForest:
    """Binary trees that record which sets were merged; the leaves 0..N-1 are the items."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.children: list[tuple[int, int]] = []

    def merge(self, first: _Set, second: _Set) -> _Set:
        """Return the union of two sets; the items of ``first`` come first."""
        self.children.append((first[3], second[3]))
        return first[0] + second[0], first[1] + second[1], first[2], self.num_items + len(self.children) - 1

    def items(self, root: int) -> list[int]:
        """Return the items under a node, ascending."""
        found = []
        stack = [root]
        while stack:
            node = stack.pop()
            if node < self.num_items:
                found.append(node)
            else:
                stack.extend(self.children[node - self.num_items])
        return sorted(found)


def _difference(singles: list[_Set], states: list[list[_Set]], k: int, forest: _MergeForest) -> list[_Set]:
    """Merge all states into one. A state is its non-empty sets in ascending order; ``singles`` are one-item states.

    Singles come in ascending order and are taken from the end, which is the order in which a heap would return them.
    """
    heap = [(*_priority(state, k), state) for state in states]
    heapq.heapify(heap)

    def pop() -> list[_Set]:
        if singles:
            value, _, index, _ = singles[-1]
            if not heap or (-value, -value, -1, -index) < heap[0][:4]:
                return [singles.pop()]
        return heapq.heappop(heap)[4]

    while len(heap) + len(singles) > 1:
        state = _merge_states(pop(), pop(), k, forest)
        heapq.heappush(heap, (*_priority(state, k), state))
    return pop()


def _priority(state: list[_Set], k: int) -> tuple[Any, Any, int, int]:
    """Order of states in the heap: largest spread first, then the one whose largest set is greater."""
    total, count, first, _ = state[-1]
    spread = total - state[0][0] if len(state) == k else total
    return -spread, -total, -count, -first


def _merge_states(left: list[_Set], right: list[_Set], k: int, forest: _MergeForest) -> list[_Set]:
    """Merge set ``i`` of one state with set ``k - 1 - i`` of the other; empty sets are not stored."""
    overlap = len(left) + len(right) - k
    if len(left) == 1:  # folding in one item is what nearly all merges are
        left, right, swapped = right, left, True
    else:
        swapped = False
    if len(right) == 1:
        one = right[0]
        if overlap > 0:
            one = forest.merge(one, left[0]) if swapped else forest.merge(left[0], one)
            del left[0]
        insort(left, one)
        return left
    if overlap <= 0:
        return sorted(left + right)
    merged = [forest.merge(left[overlap - 1 - t], right[t]) for t in range(overlap)]
    return sorted(merged + left[overlap:] + right[overlap:])


def pack_bins(
    work: Sequence[float],
    tokens: Sequence[int],
    budget: int,
    *,
    min_bins: int = 1,
    max_items: int | None = None,
) -> list[list[int]]:
    """Divide items into the fewest bins found that hold at most ``budget`` tokens, with even work.

    For each count from the lower bound up: equal work, else equal tokens, else best fit decreasing, whichever fits
    first.

    Args:
        work: ``[N]`` cost of each item.
        tokens: ``[N]`` tokens of each item, none above ``budget``.
        budget: Most tokens of a bin.
        min_bins: Lower bound of the number of bins; more than ``N`` counts as ``N``.
        max_items: Most items of a bin; ``None`` is no limit.

    Returns:
        Non-empty lists of indices, each ascending.
    """
    num_items = len(tokens)
    if num_items == 0:
        return []
    fewest = max(-(-sum(tokens) // budget) if budget else 1, -(-num_items // max_items) if max_items else 1)
    fewest = max(fewest, min(min_bins, num_items), 1)
    best_fit = _best_fit_decreasing(tokens, budget, max_items)
    most = max(fewest, len(best_fit))
    # Far apart where every item needs half a bin or more; trying each count would then cost more than it saves.
    for count in sorted({fewest + (most - fewest) * step // 4 for step in range(5)}):
        for costs in (work, tokens):
            bins = [one for one in karmarkar_karp(costs, count) if one]
            if _fits(bins, tokens, budget, max_items):
                return bins
    return split_bins(best_fit, work, most)


def split_bins(bins: list[list[int]], work: Sequence[float], count: int) -> list[list[int]]:
    """Split the bins of most work until there are ``count``, or none holds two items."""
    bins = list(bins)
    while len(bins) < count:
        splittable = [i for i, one in enumerate(bins) if len(one) > 1]
        if not splittable:
            break
        heaviest = max(splittable, key=lambda i: sum(work[item] for item in bins[i]))
        items = bins.pop(heaviest)
        for half in karmarkar_karp([work[item] for item in items], 2):
            bins.append([items[i] for i in half])
    return bins


def _fits(bins: list[list[int]], tokens: Sequence[int], budget: int, max_items: int | None) -> bool:
    return all((max_items is None or len(one) <= max_items) and sum(tokens[i] for i in one) <= budget for one in bins)


def _best_fit_decreasing(tokens: Sequence[int], budget: int, max_items: int | None) -> list[list[int]]:
    """Put each item, the longest first, where it leaves the least room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending; full bins are dropped
    for item in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        place = bisect_left(room, (tokens[item], -1))
        if place == len(room):
            left, index = budget, len(bins)
            bins.append([])
        else:
            left, index = room.pop(place)
        bins[index].append(item)
        if max_items is None or len(bins[index]) < max_items:
            insort(room, (left - tokens[item], index))
    return [sorted(one) for one in bins]


def biggest_in_the_middle(bins: Iterable[list[int]], totals: Sequence[float]) -> list[list[int]]:
    """Order bins so that the biggest sit in the middle and small ones at both ends.

    Sorted by (total, first index) descending into P0, P1, ... the order is ..., P4, P2, P0, P1, P3, ...: short ends
    shorten the bubbles of a pipeline, and ranks that order alike run bins of similar size at the same time.

    Args:
        bins: Lists of indices; empty ones count as smallest.
        totals: Work of each bin.
    """
    ranked = sorted(zip(totals, bins, strict=True), key=lambda pair: (pair[0], pair[1][:1]), reverse=True)
    ordered = [one for _, one in ranked]
    return ordered[0::2][::-1] + ordered[1::2]


def restore_order(micro_batches: Iterable[Sequence[int]]) -> list[int]:
    """Return the inverse permutation of concatenated micro-batches: ``inverse[flat[j]] == j``.

    Outputs joined in micro-batch order come back in the order of the inputs by ``joined[inverse]``.

    Args:
        micro_batches: Index lists that together hold 0..B-1 once each, as positions within the batch that was split.

    Raises:
        ValueError: If the indices are not a permutation of 0..B-1.
    """
    flat = [index for micro_batch in micro_batches for index in micro_batch]
    inverse = [-1] * len(flat)
    for position, index in enumerate(flat):
        if not 0 <= index < len(flat) or inverse[index] != -1:
            raise ValueError(
                f"restore_order: index {index} is out of range or twice among {len(flat)} indices; "
                f"micro-batches must hold 0..{len(flat) - 1} once each."
            )
        inverse[index] = position
    return inverse
