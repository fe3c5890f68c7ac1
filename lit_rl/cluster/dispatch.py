"""How one call on a worker group becomes calls on its workers: the `dispatch` decorator and the modes' arithmetic.

    @dispatch(mode=Dispatch.SPLIT)
    async def score(self, rows: list[Row]) -> list[float]: ...

    scores = group.score(rows)      # each worker gets its share, results come back in input order

Nothing here calls a worker: arguments go in, arguments per rank come out (`plan_calls`), results are joined
(`join_results`). Nothing is guessed from lengths, padded, or changed in place. Calls are made in ``group_method.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_RULE_ATTRIBUTE = "__dispatch_rule__"


class DispatchError(ValueError):
    """Arguments or results of a group call do not fit its mode."""


class Dispatch(Enum):
    """What each worker gets, and what the caller gets back.

    What is split must be a list, a tuple, or an object with ``len``, ``split(sizes) -> list`` and a class method
    ``concat(parts)``.
    """

    ALL_TO_ALL = "all_to_all"
    """Plain arguments go to every worker, `Scatter` ones by rank. Returns a list in rank order. The default."""

    ONE_TO_ALL = "one_to_all"
    """Every argument goes to every worker as it is. Returns a list in rank order."""

    DP_COMPUTE = "dp_compute"
    """Every argument has one entry per worker. Returns a list in rank order."""

    SPLIT = "split"
    """Every argument is split into near-equal shares, `Broadcast` ones are not. Returns the joined results, in input
    order. Any number of items works: the first workers get one more, workers without a share are not called."""

    SPLIT_METRIC = "split_metric"
    """As `SPLIT`, but returns a list with one result per worker that had a share."""

    # The names verl users look for.
    DP_COMPUTE_PROTO = "split"
    DP_COMPUTE_METRIC = "split_metric"


class Execute(Enum):
    """Which workers run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Mesh:
    """A mode: workers of one data-parallel rank get the same share, and only collecting workers' results are joined.

    Workers say where they are in the mesh called ``name`` with `MeshMember.register_mesh`. Arguments are split into
    equal shares, because ranks of a mesh run collectives together.
    """

    name: str


@dataclass(frozen=True)
class Scatter:
    """An argument with one entry per worker: entry ``r`` goes to worker ``r``."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Broadcast:
    """An argument that every worker gets whole."""

    value: Any


@dataclass(frozen=True)
class MeshPosition:
    """Place of one worker in a mesh."""

    dp_rank: int
    is_collecting: bool


class MeshMember:
    """Base of workers that take part in meshes."""

    def register_mesh(self, name: str, *, dp_rank: int, is_collecting: bool) -> None:
        """Say where this worker is in a mesh; once per mesh."""
        positions: dict[str, MeshPosition] = self.__dict__.setdefault("_mesh_positions", {})
        if name in positions:
            raise ValueError(f"Mesh {name!r} is already registered with this worker, as {positions[name]}.")
        positions[name] = MeshPosition(dp_rank, is_collecting)

    async def get_mesh_position(self, name: str) -> MeshPosition:
        """Return what `register_mesh` was told."""
        positions: dict[str, MeshPosition] = self.__dict__.get("_mesh_positions", {})
        if name not in positions:
            raise ValueError(f"Mesh {name!r} is not registered with this worker; it has {sorted(positions)}.")
        return positions[name]


@dataclass(frozen=True)
class DispatchRule:
    """What `dispatch` recorded about a method."""

    mode: Dispatch | Mesh
    execute: Execute
    blocking: bool
    timeout_s: float


@dataclass
class Call:
    """Arguments of one worker's call."""

    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)


def dispatch(
    mode: Dispatch | Mesh = Dispatch.ALL_TO_ALL,
    execute: Execute = Execute.ALL,
    blocking: bool = True,
    timeout_s: float = 600.0,
) -> Callable[[F], F]:
    """Mark a worker's method as one that is called on the group.

    Args:
        mode: What each worker gets, see `Dispatch` and `Mesh`.
        execute: All workers, or rank 0 only: then arguments are passed untouched and one result comes back.
        blocking: Wait for the result, or return futures: one per rank, or one in all where the mode joins results.
        timeout_s: Longest wait for a worker, in seconds; ``group.method.options(timeout_s=...)`` overrides it.

    Raises:
        TypeError: A mode or execution that is none.
        ValueError: Rank 0 only, with a mode that makes one share per worker.
    """
    if not isinstance(mode, Dispatch | Mesh):
        raise TypeError(f"dispatch(mode={mode!r}): give a member of Dispatch, or Mesh(name).")
    if not isinstance(execute, Execute):
        raise TypeError(f"dispatch(execute={execute!r}): give a member of Execute.")
    if execute is Execute.RANK_ZERO and mode is not Dispatch.ALL_TO_ALL:
        raise ValueError(
            f"dispatch(mode={mode}, execute=RANK_ZERO): rank 0 alone takes arguments as they are; omit mode."
        )

    def mark(method: F) -> F:
        setattr(method, _RULE_ATTRIBUTE, DispatchRule(mode, execute, blocking, timeout_s))
        return method

    return mark


def find_rules(worker_cls: type) -> dict[str, DispatchRule]:
    """Return the rules of all marked methods of a class, those of its bases included."""
    rules: dict[str, DispatchRule] = {}
    for base in reversed(worker_cls.__mro__):
        for name, member in vars(base).items():
            rules.pop(name, None)  # an override without the mark is not a group method
            if isinstance(rule := getattr(member, _RULE_ATTRIBUTE, None), DispatchRule):
                rules[name] = rule
    return rules


def plan_calls(
    method: str,
    rule: DispatchRule,
    positions: Sequence[MeshPosition] | None,
    num_workers: int,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> list[Call | None]:
    """Return each worker's arguments, ``None`` for a worker that is not called.

    Args:
        method: Name, for messages.
        rule: Of the method.
        positions: Place of every worker in the mesh, where the mode is one.
        num_workers: Size of the group.
        args: As the caller gave them.
        kwargs: As the caller gave them.

    Raises:
        DispatchError: If they do not fit the mode; names method, argument and lengths.
    """
    given = {f"argument {index}": value for index, value in enumerate(args)} | dict(kwargs)
    if rule.execute is Execute.RANK_ZERO:
        shares: dict[str, list[Any]] = {name: [value] for name, value in given.items()}
        return [_call_of(shares, 0, len(args)), *[None] * (num_workers - 1)]
    if isinstance(rule.mode, Mesh):
        assert positions is not None
        num_shares = 1 + max(position.dp_rank for position in positions)
        sizes = _equal_sizes(method, rule.mode, given, num_shares)
        shares = {name: _split(value, sizes) for name, value in given.items()}
        return [_call_of(shares, position.dp_rank, len(args)) for position in positions]
    if rule.mode in (Dispatch.SPLIT, Dispatch.SPLIT_METRIC):
        sizes = near_equal_sizes(_common_length(method, given), num_workers)
        shares = {name: _split(value, sizes) for name, value in given.items()}
        return [_call_of(shares, rank, len(args)) if sizes[rank] else None for rank in range(num_workers)]
    shares = {name: _one_each(method, name, value, rule.mode, num_workers) for name, value in given.items()}
    return [_call_of(shares, rank, len(args)) for rank in range(num_workers)]


def join_results(
    method: str,
    rule: DispatchRule,
    positions: Sequence[MeshPosition] | None,
    results: Sequence[Any],
    calls: Sequence[Any],
) -> Any:
    """Return what the caller gets, from one result per worker (those not called are skipped).

    Raises:
        DispatchError: If results that are to be joined are of different types, or of one that cannot be joined.
    """
    if rule.execute is Execute.RANK_ZERO:
        return results[0]
    called = [rank for rank, call in enumerate(calls) if call is not None]
    if isinstance(rule.mode, Mesh):
        assert positions is not None
        # By share, not by rank: the caller gets rows back in the order in which it gave them.
        collecting = [rank for rank in called if positions[rank].is_collecting]
        return _concat(method, [results[rank] for rank in sorted(collecting, key=lambda r: positions[r].dp_rank)])
    if rule.mode is Dispatch.SPLIT:
        return _concat(method, [results[rank] for rank in called])
    return [results[rank] for rank in called]


def is_joined(rule: DispatchRule) -> bool:
    """Whether a call has one result in all, rather than one per rank."""
    return rule.execute is Execute.RANK_ZERO or isinstance(rule.mode, Mesh) or rule.mode.name.startswith("SPLIT")


def near_equal_sizes(num_items: int, num_shares: int) -> list[int]:
    """Return sizes that differ by at most one, the larger first: 60 items in 8 shares are 8, 8, 8, 8, 7, 7, 7, 7."""
    quotient, remainder = divmod(num_items, num_shares)
    return [quotient + (share < remainder) for share in range(num_shares)]


def _equal_sizes(method: str, mesh: Mesh, given: dict[str, Any], num_shares: int) -> list[int]:
    length = _common_length(method, given)
    if length % num_shares:
        raise DispatchError(
            f"{method}(): {length} items cannot be split equally over the {num_shares} data-parallel ranks of mesh "
            f"{mesh.name!r}. Give a multiple of {num_shares}."
        )
    return [length // num_shares] * num_shares


def _common_length(method: str, given: dict[str, Any]) -> int:
    lengths: dict[str, int] = {}
    for name, value in given.items():
        if isinstance(value, Broadcast):
            continue
        if not (isinstance(value, list | tuple) or (hasattr(value, "split") and hasattr(value, "concat"))):
            raise DispatchError(
                f"{method}(): {name} is a {type(value).__name__}, which cannot be split. Wrap it in Broadcast(...) "
                "to give it to every worker, or pass a list, or an object with len(), split(sizes) and concat(parts)."
            )
        lengths[name] = len(value)
    if not lengths:
        raise DispatchError(f"{method}(): no argument to split; give at least one that is not Broadcast.")
    if len(set(lengths.values())) > 1:
        raise DispatchError(f"{method}(): arguments to split differ in length: {lengths}.")
    return next(iter(lengths.values()))


def _split(value: Any, sizes: list[int]) -> list[Any]:
    if isinstance(value, Broadcast):
        return [value.value] * len(sizes)
    if not isinstance(value, list | tuple):
        return list(value.split(sizes))
    starts = [sum(sizes[:share]) for share in range(len(sizes))]
    return [value[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _one_each(method: str, name: str, value: Any, mode: Dispatch, num_workers: int) -> list[Any]:
    values = value.values if isinstance(value, Scatter) else value
    if mode is Dispatch.DP_COMPUTE or (mode is Dispatch.ALL_TO_ALL and isinstance(value, Scatter)):
        if isinstance(value, Broadcast):
            return [value.value] * num_workers
        if not isinstance(values, list | tuple) or len(values) != num_workers:
            what = f"{len(values)} entries" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
            raise DispatchError(
                f"{method}(): {name} is {what}, but must be a list with one entry for each of {num_workers} workers."
            )
        return list(values)
    if isinstance(value, Scatter):
        raise DispatchError(
            f"{method}(): {name} is Scatter(...), but ONE_TO_ALL gives the same to all; use ALL_TO_ALL."
        )
    return [value.value if isinstance(value, Broadcast) else value] * num_workers


def _call_of(shares: dict[str, list[Any]], share: int, num_args: int) -> Call:
    values = [(name, values[share]) for name, values in shares.items()]
    return Call([value for _, value in values[:num_args]], dict(values[num_args:]))


def _concat(method: str, results: list[Any]) -> Any:
    if not results or all(result is None for result in results):
        return [] if not results else None
    types = {type(result) for result in results}
    if len(types) > 1:
        names = sorted(kind.__name__ for kind in types)
        raise DispatchError(f"{method}(): workers returned different types, {', '.join(names)}; return one type.")
    kind = types.pop()
    if issubclass(kind, list | tuple):
        return kind(item for result in results for item in result)
    if not hasattr(kind, "concat"):
        raise DispatchError(f"{method}(): results of type {kind.__name__} cannot be joined; return a list.")
    return kind.concat(results)
