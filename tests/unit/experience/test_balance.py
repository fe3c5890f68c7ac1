"""Karmarkar-Karp, token budgets and orders, against hand-worked partitions (contracts 3.3-3.5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.experience.balance import (
    biggest_in_the_middle,
    karmarkar_karp,
    pack_bins,
    restore_order,
    sequence_workload,
    split_bins,
)

EIGHT = [100, 200, 300, 400, 500, 600, 700, 800]


def workloads(lengths: list[int]) -> list[int]:
    return [sequence_workload(length) for length in lengths]


def test_workload_has_a_linear_and_a_quadratic_part() -> None:
    assert sequence_workload(1024) == 26_214_400
    assert sequence_workload(4096) == 117_440_512
    assert sequence_workload(10, linear=6) == 160


def test_workload_of_an_array_stays_in_64_bit_integers() -> None:
    work = sequence_workload(np.array([1024, 4096, 3_000_000_000], dtype=np.int64))

    assert work.dtype == np.int64
    assert work.tolist() == [26_214_400, 117_440_512, 24576 * 3_000_000_000 + 3_000_000_000**2]


@pytest.mark.parametrize(
    ("lengths", "k", "equal_size", "expected"),
    [
        (EIGHT, 2, True, [[1, 2, 4, 7], [0, 3, 5, 6]]),
        (EIGHT, 4, True, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        (EIGHT, 3, False, [[1, 4, 5], [0, 3, 6], [2, 7]]),
        (EIGHT, 5, False, [[7], [6], [0, 5], [1, 4], [2, 3]]),
        ([8192, 4096, 4096, 2048, 2048, 2048, 2048, 1024], 4, False, [[0], [1, 3], [4, 5, 6], [2, 7]]),
        ([1000, 10, 10, 10], 2, True, [[0, 1], [2, 3]]),
        ([6, 6, 6], 2, False, [[0, 1], [2]]),
    ],
)
def test_golden_partitions(lengths: list[int], k: int, equal_size: bool, expected: list[list[int]]) -> None:
    assert karmarkar_karp(workloads(lengths), k, equal_size) == expected


def test_fewer_items_than_sets_leave_empty_sets() -> None:
    assert karmarkar_karp([3, 5], 4) == [[1], [0], [], []]
    assert karmarkar_karp([], 2) == [[], []]
    assert karmarkar_karp([3, 5, 1], 1) == [[0, 1, 2]]


def test_sets_of_equal_size_need_a_multiple() -> None:
    with pytest.raises(ValueError, match="5 items do not divide into 2 sets"):
        karmarkar_karp([1, 2, 3, 4, 5], 2, equal_size=True)
    with pytest.raises(ValueError, match="k=0"):
        karmarkar_karp([1], 0)


def plain_differencing(values: list[int], k: int, equal_size: bool) -> list[list[int]]:
    """The definition of contracts 3.4 written out, every set a full list: slow, and the reference."""
    order = sorted(range(len(values)), key=lambda i: (values[i], i))
    empty = (0, 0, [])
    if equal_size:
        states = [[(values[i], 1, [(i, values[i])]) for i in order[n : n + k]] for n in range(0, len(order), k)]
    else:
        states = [[(values[i], 1, [(i, values[i])])] + [empty] * (k - 1) for i in order]
    states = [sorted(state, reverse=True) for state in states]
    while len(states) > 1:
        states.sort(key=lambda state: (state[0][0] - state[-1][0], state[0]))
        left, right = states.pop(), states.pop()
        pairs = zip(left, reversed(right), strict=True)
        states.append(sorted(((a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs), reverse=True))
    return [sorted(i for i, _ in items) for _, _, items in states[0]]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=30), st.integers(1, 8), st.booleans())
def test_equals_the_definition_written_out(values: list[int], k: int, equal_size: bool) -> None:
    if equal_size:
        values = values * k

    assert karmarkar_karp(values, k, equal_size) == plain_differencing(values, k, equal_size)


# O18: the cap is a cap, also where equal work would exceed it.
@pytest.mark.parametrize(
    ("lengths", "budget", "count"), [([7] * 8, 8, 8), ([6, 5, 5, 4, 4], 12, 3), ([6, 6, 6], 10, 3)]
)
def test_bins_never_exceed_the_budget(lengths: list[int], budget: int, count: int) -> None:
    bins = pack_bins(workloads(lengths), lengths, budget)

    assert len(bins) == count
    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in one) for one in bins) <= budget


def test_bins_that_no_even_split_gives_are_found_by_best_fit() -> None:
    # Total 30 = {8, 7} and {6, 5, 4}; differencing ends at 16 and 14.
    lengths = [8, 7, 6, 5, 4]

    assert karmarkar_karp(lengths, 2) == [[1, 3, 4], [0, 2]]
    assert sorted(pack_bins(workloads(lengths), lengths, 15)) == [[0, 1], [2, 3, 4]]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 50), max_size=40), st.integers(50, 120), st.integers(1, 6), st.integers(1, 9) | st.none()
)
def test_packing_covers_once_within_budget_and_size(
    lengths: list[int], budget: int, min_bins: int, max_items: int | None
) -> None:
    bins = pack_bins(workloads(lengths), lengths, budget, min_bins=min_bins, max_items=max_items)

    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    assert all(bins)
    assert len(bins) >= min(min_bins, len(lengths))
    assert all(sum(lengths[i] for i in one) <= budget and len(one) <= (max_items or 40) for one in bins)


def test_splitting_stops_when_nothing_is_left_to_split() -> None:
    assert sorted(split_bins([[0, 1, 2], [3]], [5, 4, 3, 9], 3)) == [[0], [1, 2], [3]]
    assert split_bins([[0], [1]], [1, 1], 5) == [[0], [1]]


def test_biggest_sit_in_the_middle() -> None:
    # P0 >= P1 >= ... comes out as P4 P2 P0 P1 P3 (contracts 3.3).
    assert biggest_in_the_middle([[4], [2], [0], [3], [1]], [1, 3, 5, 2, 4]) == [[4], [2], [0], [1], [3]]
    assert biggest_in_the_middle([[], [1], [0]], [0, 7, 7]) == [[], [1], [0]]


def test_emitted_order_of_five_sets() -> None:
    sets = karmarkar_karp(workloads(EIGHT), 5)
    totals = [sum(workloads(EIGHT)[i] for i in one) for one in sets]

    assert biggest_in_the_middle(sets, totals) == [[2, 3], [0, 5], [7], [6], [1, 4]]


@given(st.permutations(list(range(7))), st.integers(0, 7))
def test_restore_order_inverts_split_and_concatenate(order: list[int], cut: int) -> None:
    inverse = restore_order([order[:cut], [], order[cut:]])
    outputs = [f"output of {i}" for i in order]

    assert [outputs[inverse[i]] for i in range(7)] == [f"output of {i}" for i in range(7)]


def test_restore_order_refuses_what_is_no_permutation() -> None:
    with pytest.raises(ValueError, match="index 0 is out of range or twice"):
        restore_order([[0], [0]])
