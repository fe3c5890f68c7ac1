from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest

from lit_rl.cluster import (
    Broadcast,
    Dispatch,
    DispatchError,
    Execute,
    Mesh,
    MeshMember,
    Runtime,
    Scatter,
    WorkerGroup,
    WorkerGroupError,
    dispatch,
)
from lit_rl.cluster.dispatch import near_equal_sizes


class Rows:
    """A container of its own kind: all that dispatch needs is len, split and concat."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def split(self, sizes: list[int]) -> list[Rows]:
        remaining = iter(self.values)
        return [Rows([next(remaining) for _ in range(size)]) for size in sizes]

    @classmethod
    def concat(cls, parts: list[Rows]) -> Rows:
        return cls([value for part in parts for value in part.values])


class Worker(MeshMember):
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        # Four workers: two data-parallel ranks of two tensor-parallel workers each.
        self.register_mesh("train", dp_rank=rank // 2, is_collecting=rank % 2 == 0)

    @dispatch()
    async def echo(self, *args: Any, **kwargs: Any) -> Any:
        return self.rank, args, kwargs

    @dispatch(mode=Dispatch.ONE_TO_ALL)
    async def same(self, value: Any) -> Any:
        return self.rank, value

    @dispatch(mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def load(self, value: Any) -> Any:
        await asyncio.sleep(0.01 * (3 - self.rank))  # the last rank is the first to finish
        return self.rank, value

    @dispatch(mode=Dispatch.DP_COMPUTE)
    async def one_each(self, value: Any) -> Any:
        return self.rank, value

    @dispatch(mode=Dispatch.SPLIT)
    async def double(self, rows: Any, factor: int = 2) -> Any:
        if isinstance(rows, Rows):
            return Rows([factor * value for value in rows.values])
        return [factor * value for value in rows]

    @dispatch(mode=Dispatch.SPLIT_METRIC)
    def count(self, rows: list[int]) -> int:
        return len(rows)

    @dispatch(execute=Execute.RANK_ZERO)
    async def ask_first(self, value: Any) -> Any:
        return self.rank, value

    @dispatch(mode=Mesh("train"))
    async def forward(self, rows: list[int]) -> list[int] | None:
        self.seen = rows
        return [100 * self.rank + row for row in rows] if self.rank % 2 == 0 else None

    @dispatch()
    async def last_share(self) -> list[int]:
        return self.seen

    @dispatch(mode=Dispatch.ONE_TO_ALL)
    async def fail_on_two(self) -> None:
        if self.rank == 2:
            raise KeyError("missing weight")
        await asyncio.sleep(60)  # as in a collective whose partner is gone

    @dispatch(mode=Dispatch.ONE_TO_ALL)
    async def forever(self) -> None:
        await asyncio.sleep(60)

    @dispatch(mode=Dispatch.SPLIT)
    async def mixed(self, rows: list[int]) -> Any:
        return rows if self.rank == 0 else Rows(rows)


def create(runtime: Runtime, name: str = "worker") -> Any:
    return WorkerGroup.create(runtime, Worker, 4, name=name, per_rank_kwargs=[{"rank": rank} for rank in range(4)])


@pytest.fixture
def group(inline_runtime: Runtime) -> Any:
    return create(inline_runtime)


@pytest.mark.parametrize(
    ("num_items", "num_workers", "expected"),
    [(60, 8, [8, 8, 8, 8, 7, 7, 7, 7]), (2, 4, [1, 1, 0, 0]), (0, 4, [0, 0, 0, 0])],
)
def test_shares_differ_by_at_most_one(num_items: int, num_workers: int, expected: list[int]) -> None:
    # Case O17.
    assert near_equal_sizes(num_items, num_workers) == expected


@pytest.mark.parametrize("num_items", [0, 2, 4, 7])
def test_split_returns_each_item_once_in_input_order(group: Any, num_items: int) -> None:
    # Case O17: not divisible, fewer items than workers, none.
    rows = list(range(num_items))

    assert group.double(rows) == [2 * row for row in rows]
    assert rows == list(range(num_items))


def test_workers_without_a_share_are_not_called(group: Any) -> None:
    assert group.count([5, 6]) == [1, 1]
    assert group.count(list(range(6))) == [2, 2, 1, 1]


def test_split_takes_any_type_that_can_split_and_concat(group: Any) -> None:
    assert group.double(Rows([1, 2, 3, 4, 5]), factor=Broadcast(10)).values == [10, 20, 30, 40, 50]


def test_split_works_with_keyword_arguments_only(group: Any) -> None:
    assert group.double(rows=[1, 2, 3]) == [2, 4, 6]


def test_all_to_all_never_guesses_from_a_length(group: Any) -> None:
    results = group.echo([10, 11, 12, 13], key=Scatter(list("abcd")))

    assert results == [(rank, ([10, 11, 12, 13],), {"key": "abcd"[rank]}) for rank in range(4)]


def test_one_to_all_gives_every_worker_the_same(group: Any) -> None:
    assert group.same([1, 2, 3, 4]) == [(rank, [1, 2, 3, 4]) for rank in range(4)]


def test_rank_zero_alone_gets_arguments_untouched_and_returns_one_result(group: Any) -> None:
    assert group.ask_first([1, 2, 3, 4]) == (0, [1, 2, 3, 4])


def test_non_blocking_returns_one_future_per_rank_in_rank_order(group: Any) -> None:
    # Acceptance A1.
    futures = group.load("x")

    assert [type(future) for future in futures] == [concurrent.futures.Future] * 4
    assert [future.result(5) for future in futures] == [(rank, "x") for rank in range(4)]


def test_non_blocking_with_a_joined_result_returns_one_future_that_can_be_an_argument(group: Any) -> None:
    future = group.double.options(blocking=False)([1, 2, 3])

    assert group.double(future) == [4, 8, 12]


def test_workers_of_one_data_parallel_rank_get_the_same_and_one_of_them_contributes(group: Any) -> None:
    # Acceptance A2.
    assert group.forward([1, 2, 3, 4]) == [1, 2, 203, 204]
    assert group.last_share() == [[1, 2], [1, 2], [3, 4], [3, 4]]
    assert group.forward(rows=[5, 6]) == [5, 206]


def test_a_mesh_refuses_what_it_cannot_split_equally(group: Any) -> None:
    with pytest.raises(DispatchError, match=r"forward\(\): 3 items .* 2 data-parallel ranks of mesh 'train'"):
        group.forward([1, 2, 3])


@pytest.mark.parametrize(
    ("dp_ranks", "collecting", "message"),
    [
        ([0, 0, 2, 2], [1, 0, 1, 0], r"data-parallel rank 1 of mesh 'train' has the workers \[\], of which \[\]"),
        ([0, 0, 1, 1], [1, 0, 0, 0], r"rank 1 of mesh 'train' has the workers \[2, 3\], of which \[\] collect"),
        ([0, 0, 1, 1], [1, 1, 1, 0], r"rank 0 of mesh 'train' has the workers \[0, 1\], of which \[0, 1\] collect"),
    ],
)
def test_a_mesh_that_would_lose_or_double_rows_is_refused(
    inline_runtime: Runtime, dp_ranks: list[int], collecting: list[int], message: str
) -> None:
    group: Any = create_meshed(inline_runtime, dp_ranks, collecting)
    with pytest.raises(DispatchError, match=message):
        group.forward([1, 2, 3, 4, 5, 6])


def test_a_mesh_returns_rows_in_input_order_whatever_the_order_of_its_ranks(inline_runtime: Runtime) -> None:
    group: Any = create_meshed(inline_runtime, [1, 1, 0, 0], [1, 0, 1, 0])
    assert group.forward([1, 2, 3, 4]) == [201, 202, 3, 4]


class Meshed(Worker):
    def __init__(self, rank: int, dp_rank: int, is_collecting: bool) -> None:
        self.rank = rank
        self.register_mesh("train", dp_rank=dp_rank, is_collecting=is_collecting)


def create_meshed(runtime: Runtime, dp_ranks: list[int], collecting: list[int]) -> WorkerGroup:
    kwargs = [
        {"rank": rank, "dp_rank": dp_rank, "is_collecting": bool(collects)}
        for rank, (dp_rank, collects) in enumerate(zip(dp_ranks, collecting, strict=True))
    ]
    return WorkerGroup.create(runtime, Meshed, 4, name="meshed", per_rank_kwargs=kwargs)


def test_a_mesh_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'train' is already registered"):
        Worker().register_mesh("train", dp_rank=0, is_collecting=True)


def test_a_failing_rank_is_named_and_the_others_are_not_waited_for(group: Any) -> None:
    # Acceptance A3. The others would take a minute.
    with pytest.raises(WorkerGroupError, match=r"Rank 2 \(worker-2\):(.|\n)*missing weight") as caught:
        group.fail_on_two.options(timeout_s=50.0)()

    assert isinstance(caught.value.failures[2], KeyError)
    assert caught.value.cancelled == [0, 1, 3]


def test_a_failing_rank_reaches_every_future(group: Any) -> None:
    futures = group.fail_on_two.options(blocking=False)()

    for future in futures:
        with pytest.raises(WorkerGroupError, match="failed on 1 of 4"):
            future.result(5)


def test_a_timeout_is_an_option_of_the_call(group: Any) -> None:
    with pytest.raises(WorkerGroupError, match=r"worker-3 did not answer forever\(\) within 0.05 s"):
        group.forever.options(timeout_s=0.05)()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda group: group.double(5),
            r"double\(\): argument 0 is a int, which cannot be split. Wrap it in Broadcast",
        ),
        (lambda group: group.double([1], factor=[1, 2]), r"differ in length: {'argument 0': 1, 'factor': 2}"),
        (lambda group: group.double(Broadcast([1])), "no argument to split"),
        (lambda group: group.one_each([1, 2]), "argument 0 is 2 entries.*each of 4 workers"),
        (lambda group: group.echo(Scatter([1, 2, 3])), "argument 0 is 3 entries"),
        (lambda group: group.same(Scatter([1, 2, 3, 4])), "use ALL_TO_ALL"),
        (lambda group: group.mixed([1, 2]), "different types, Rows, list"),
    ],
)
def test_what_does_not_fit_the_mode_is_told_by_name(group: Any, call: Any, message: str) -> None:
    with pytest.raises(DispatchError, match=message):
        call(group)


def test_impossible_rules_are_refused_where_they_are_written() -> None:
    with pytest.raises(TypeError, match="mode='split'"):
        dispatch(mode="split")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="execute='all'"):
        dispatch(execute="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank 0 alone"):
        dispatch(mode=Dispatch.ONE_TO_ALL, execute=Execute.RANK_ZERO)


def test_a_marked_method_may_not_hide_the_groups_own(inline_runtime: Runtime) -> None:
    class Clash:
        @dispatch()
        async def stop(self) -> None: ...

    with pytest.raises(ValueError, match="Clash.stop is marked"):
        WorkerGroup.create(inline_runtime, Clash, 1, name="clash")


def test_the_same_group_works_over_ray(ray_runtime: Runtime) -> None:
    group = create(ray_runtime, "dispatch")
    try:
        assert group.double(list(range(7))) == [2 * row for row in range(7)]
        assert group.double(Rows([1, 2, 3, 4, 5])).values == [2, 4, 6, 8, 10]
        assert [future.result(20) for future in group.load("x")] == [(rank, "x") for rank in range(4)]
        assert group.forward([1, 2, 3, 4]) == [1, 2, 203, 204]
        assert group.last_share() == [[1, 2], [1, 2], [3, 4], [3, 4]]
        assert group.same([1, 2]) == [(rank, [1, 2]) for rank in range(4)]
        assert group.one_each(list("abcd")) == [(rank, "abcd"[rank]) for rank in range(4)]
        assert group.count(list(range(6))) == [2, 2, 1, 1]
        assert group.double([1, 2], factor=Broadcast(5)) == [5, 10]
        assert group.ask_first([1, 2, 3, 4]) == (0, [1, 2, 3, 4])
        assert group.echo([1, 2, 3, 4], key=Scatter(list("abcd"))) == [
            (rank, ([1, 2, 3, 4],), {"key": "abcd"[rank]}) for rank in range(4)
        ]
        assert group.double(group.double.options(blocking=False)([1, 2, 3])) == [4, 8, 12]
        with pytest.raises(WorkerGroupError, match=r"Rank 2 \(dispatch-2\):(.|\n)*missing weight"):
            group.fail_on_two.options(timeout_s=50.0)()
    finally:
        ray_runtime.loop.run(group.stop(2.0), timeout_s=30.0, what="the group to stop")
