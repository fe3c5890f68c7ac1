"""Decide which rank computes which sequences, in which mini-batch and micro-batch, for a whole iteration.

Position in the flow: collector -> lengths -> **plan** -> shares of the ranks -> loader -> training_step. A pure
function of lengths, counts and a seed: every rank computes the same plan, so batching needs no collective and nothing
can hang on unequal counts. Tokens, tensors and devices never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_rl.experience.balance import sequence_workload
from lit_rl.experience.plan_costs import Costs, plan_metrics
from lit_rl.experience.plan_units import Unit, build_units, deal_first_pass, deal_later_pass, pack_ranks

MicroBatches = list[list[list[int]]]
"""``[rank][micro_batch]`` lists of sequence indices, ascending; every rank has the same number of micro-batches."""


@dataclass(frozen=True, kw_only=True)
class MiniBatchPlan:
    """One optimizer step.

    Attributes:
        micro_batches: ``[rank][micro_batch]`` lists of sequence indices. Empty where a rank has less than others: it
            then runs a dummy of loss weight zero. No micro-batches at all where the mini-batch is empty.
        num_loss_tokens: Trained tokens over all ranks; the denominator of token-mean losses.
        num_sequences: Sequences with at least one trained token, over all ranks; the denominator of sequence-mean
            losses.
        num_groups: Groups of those sequences.
    """

    micro_batches: MicroBatches
    num_loss_tokens: int
    num_sequences: int
    num_groups: int


@dataclass(frozen=True, kw_only=True)
class IterationPlan:
    """Who computes what in one iteration; see `plan_iteration`.

    Attributes:
        world_size: Data-parallel ranks.
        mini_batches: ``[epoch][mini_batch]``.
        rank_sequences: ``[rank]`` ascending indices of the sequences that live on a rank, the same over all epochs.
        metrics: Numbers for the logger; see `plan_metrics`.
    """

    world_size: int
    mini_batches: list[list[MiniBatchPlan]]
    rank_sequences: list[list[int]]
    metrics: dict[str, float]
    _scoring: dict[str, MicroBatches] = field(default_factory=dict, repr=False)
    _default_scoring: MicroBatches = field(default_factory=list, repr=False)

    def mini_batch(self, epoch: int, index: int) -> MiniBatchPlan:
        """Return the plan of optimizer step ``index`` of pass ``epoch`` over the experience, both from 0."""
        return self.mini_batches[epoch][index]

    def scoring(self, name: str) -> MicroBatches:
        """Return the micro-batches of a no-gradient pass over all sequences of each rank, ``[rank][micro_batch]``.

        Args:
            name: A key of ``scoring_max_tokens``; any other name takes the budget of the update.
        """
        return self._scoring.get(name, self._default_scoring)


def plan_iteration(
    lengths: Sequence[int] | NDArray[Any],
    world_size: int,
    num_mini_batches: int,
    ppo_epochs: int,
    max_tokens: int,
    seed: int,
    *,
    loss_tokens: Sequence[int] | NDArray[Any] | None = None,
    prompt_lengths: Sequence[int] | NDArray[Any] | None = None,
    group_ids: Sequence[Hashable] | None = None,
    share_prompts: bool = False,
    micro_batch_size: int | None = None,
    scoring_max_tokens: Mapping[str, int] | None = None,
    sequence_parallel_size: int = 1,
    shuffle: bool = True,
    excluded: Collection[int] | None = None,
    workload: Callable[[NDArray[Any]], NDArray[Any]] = sequence_workload,
) -> IterationPlan:
    """Plan one iteration: mini-batches, ranks, micro-batches and the counts that normalise the losses.

    Any number of sequences goes with any number of ranks and mini-batches. Mini-batches differ by at most one in their
    number of units (sequences, or groups with shared prompts) and little in work; ranks get equal work within each
    mini-batch. A micro-batch never exceeds the token budget, and there are as few as were found. A sequence keeps its
    rank over all epochs.

    Args:
        lengths: ``[N]`` tokens of each sequence, prompt and response.
        world_size: Data-parallel ranks; ranks of one tensor-parallel group share a number.
        num_mini_batches: Optimizer steps per pass.
        ppo_epochs: Passes over the experience.
        max_tokens: Token budget of a micro-batch per device.
        seed: Seeds the composition of mini-batches, together with the epoch.
        loss_tokens: ``[N]`` trained tokens; ``None`` takes all after the prompt (all, without ``prompt_lengths``).
        prompt_lengths: ``[N]`` prompt tokens; needed for ``share_prompts``.
        group_ids: ``[N]`` samples of one prompt share an id; ``None`` makes each sequence its own group.
        share_prompts: The model computes a group's prompt once per micro-batch; whole groups stay in one mini-batch,
            and on one rank unless they exceed the budget or leave other ranks idle.
        micro_batch_size: Most sequences of a micro-batch: consecutive runs instead of balanced bins. The budget still
            holds.
        scoring_max_tokens: Budgets of no-gradient passes by name, for example ``{"old_log_prob": 32768}``.
        sequence_parallel_size: Devices that share one sequence; multiplies every budget.
        shuffle: Compose the mini-batches of the first pass at random; if not they are consecutive runs of the input.
            Later passes are always shuffled.
        excluded: Indices of failed trajectories; they are on no rank and in no mini-batch.
        workload: Maps an integer array of lengths to work.

    Returns:
        The plan, a pure function of the arguments.

    Raises:
        ValueError: If a sequence is longer than a budget, or an argument is out of range.
    """
    tokens = np.asarray(lengths, dtype=np.int64).reshape(-1)
    prompts = None if prompt_lengths is None else np.asarray(prompt_lengths, dtype=np.int64).reshape(-1)
    _check_at_least_one(
        world_size=world_size,
        num_mini_batches=num_mini_batches,
        ppo_epochs=ppo_epochs,
        max_tokens_per_micro_batch=max_tokens,
        sequence_parallel_size=sequence_parallel_size,
        micro_batch_size=1 if micro_batch_size is None else micro_batch_size,
    )
    trained = _trained_tokens(tokens, prompts, loss_tokens)
    group_of = _dense_groups(group_ids, len(tokens))
    included = _included(tokens, excluded)
    if share_prompts:
        _check_shared_prompts(prompts, group_ids, group_of, included)
    limits = {"data.max_tokens_per_micro_batch": max_tokens}
    limits.update((f"scoring_max_tokens[{name!r}]", limit) for name, limit in (scoring_max_tokens or {}).items())
    for option, limit in limits.items():
        _check_budget(tokens, included, option, limit, sequence_parallel_size)
    costs = Costs.measure(tokens, prompts, group_of, share_prompts, workload)
    budget = max_tokens * sequence_parallel_size

    bundles = _bundles(costs, included, budget, world_size, num_mini_batches, micro_batch_size)
    rngs = [np.random.default_rng([seed % 2**63, epoch]) for epoch in range(ppo_epochs)]
    first = deal_first_pass(bundles, world_size, num_mini_batches, rngs[0] if shuffle else None)
    passes = [first, *(deal_later_pass(first, bundles, rng) for rng in rngs[1:])]
    packed = [[pack_ranks(cells, budget, micro_batch_size) for cells in one_pass] for one_pass in passes]
    rank_sequences = [
        sorted(i for cells in first for unit in cells[rank] for i in unit.sequences) for rank in range(world_size)
    ]

    def score(limit: int) -> MicroBatches:
        allowed = limit * sequence_parallel_size
        units = [build_units(costs, one, allowed, micro_batch_size=micro_batch_size) for one in rank_sequences]
        return pack_ranks(units, allowed, micro_batch_size)

    return IterationPlan(
        world_size=world_size,
        mini_batches=[[_count(ranks, trained, group_of) for ranks in one_pass] for one_pass in packed],
        rank_sequences=rank_sequences,
        metrics=plan_metrics(costs, [ranks for one_pass in packed for ranks in one_pass], budget, rank_sequences),
        _scoring={name: score(limit) for name, limit in (scoring_max_tokens or {}).items()},
        _default_scoring=score(max_tokens),
    )


def _bundles(
    costs: Costs, included: list[int], budget: int, world_size: int, num_mini_batches: int, micro_batch_size: int | None
) -> list[list[Unit]]:
    """Cut all sequences into units, listed by bundle in the order of the input."""
    fair_work = float("inf")
    if costs.share_prompts and world_size > 1:
        groups = build_units(costs, included, sum(costs.tokens) + 1)
        cells = world_size * min(num_mini_batches, max(len(groups), 1))
        fair_work = max(sum(group.work for group in groups) / cells, 1.0)
    bundles: dict[int, list[Unit]] = {}
    for unit in build_units(costs, included, budget, micro_batch_size=micro_batch_size, fair_work=fair_work):
        bundles.setdefault(unit.bundle, []).append(unit)
    return list(bundles.values())


def _count(ranks: MicroBatches, trained: list[int], group_of: NDArray[np.int64]) -> MiniBatchPlan:
    """Add the global counts of one mini-batch."""
    trained_sequences = [i for bins in ranks for one in bins for i in one if trained[i] > 0]
    return MiniBatchPlan(
        micro_batches=ranks,
        num_loss_tokens=sum(trained[i] for i in trained_sequences),
        num_sequences=len(trained_sequences),
        num_groups=len({int(group_of[i]) for i in trained_sequences}),
    )


def _trained_tokens(
    tokens: NDArray[np.int64],
    prompts: NDArray[np.int64] | None,
    loss_tokens: Sequence[int] | NDArray[Any] | None,
) -> list[int]:
    if prompts is not None and (len(prompts) != len(tokens) or bool((prompts > tokens).any())):
        raise ValueError(
            f"prompt_lengths: expected one per sequence ({len(tokens)}), none above the sequence's own length."
        )
    if loss_tokens is None:
        return (tokens if prompts is None else tokens - prompts).tolist()
    if len(loss_tokens) != len(tokens):
        raise ValueError(
            f"loss_tokens has {len(loss_tokens)} entries for {len(tokens)} sequences; pass one per sequence."
        )
    return np.asarray(loss_tokens, dtype=np.int64).tolist()


def _dense_groups(group_ids: Sequence[Hashable] | None, num_sequences: int) -> NDArray[np.int64]:
    """Number groups in order of appearance."""
    if group_ids is None:
        return np.arange(num_sequences)
    if len(group_ids) != num_sequences:
        raise ValueError(
            f"group_ids has {len(group_ids)} entries for {num_sequences} sequences; pass one per sequence."
        )
    numbers: dict[Hashable, int] = {}
    return np.asarray([numbers.setdefault(group, len(numbers)) for group in group_ids], dtype=np.int64)


def _included(tokens: NDArray[np.int64], excluded: Collection[int] | None) -> list[int]:
    dropped = set(excluded or ())
    unknown = sorted(i for i in dropped if not 0 <= i < len(tokens))
    if unknown:
        raise ValueError(f"excluded: {unknown[:5]} are no indices of the {len(tokens)} sequences.")
    if bool((tokens < 0).any()):
        raise ValueError(f"lengths: sequence {int(tokens.argmin())} has {tokens.min()} tokens; lengths count from 0.")
    return [i for i in range(len(tokens)) if i not in dropped]


def _check_at_least_one(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1.")


def _check_budget(tokens: NDArray[np.int64], included: list[int], option: str, limit: int, parallel: int) -> None:
    budget = limit * parallel
    for index in included:
        if tokens[index] > budget:
            times = f" (times sequence_parallel_size={parallel})" if parallel > 1 else ""
            raise ValueError(
                f"{option}={limit}{times} is smaller than a sequence: sample {index} has {tokens[index]} tokens, "
                f"the cap is {budget}. Raise {option} to at least {-(-int(tokens[index]) // parallel)}, or lower "
                "data.max_response_tokens."
            )


def _check_shared_prompts(
    prompts: NDArray[np.int64] | None,
    group_ids: Sequence[Hashable] | None,
    group_of: NDArray[np.int64],
    included: list[int],
) -> None:
    if prompts is None or group_ids is None:
        raise ValueError("share_prompts=True needs prompt_lengths and group_ids: a group's prompt is counted once.")
    seen: dict[int, int] = {}
    for index in included:
        expected = seen.setdefault(int(group_of[index]), int(prompts[index]))
        if prompts[index] != expected:
            raise ValueError(
                f"share_prompts=True: sample {index} has a prompt of {prompts[index]} tokens, others of its group "
                f"{group_ids[index]!r} have {expected}; samples of one group must have the same prompt. "
                "Fix group_ids, or use share_prompts=False."
            )
