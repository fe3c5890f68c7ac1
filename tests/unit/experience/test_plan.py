"""The planner as arithmetic: every index once, within the budget, equal counts on every rank, one plan everywhere."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_rl.experience import plan_iteration
from lit_rl.experience.plan import IterationPlan, MicroBatches


def flatten(micro_batches: MicroBatches) -> list[int]:
    return [i for bins in micro_batches for one in bins for i in one]


def lognormal_lengths(count: int, seed: int = 0, most: int = 8192) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(400), 1.0, count)
    return np.clip(lengths, 1, most).astype(np.int64)


def check_invariants(plan: IterationPlan, lengths: list[int], budget: int, kept: list[int]) -> None:
    """Of any plan, whatever the arguments (prompts not shared)."""
    home = {i: rank for rank, members in enumerate(plan.rank_sequences) for i in members}
    assert sorted(home) == kept
    for epoch in plan.mini_batches:
        assert sorted(i for mini in epoch for i in flatten(mini.micro_batches)) == kept
        sizes = [len(flatten(mini.micro_batches)) for mini in epoch]
        assert max(sizes) - min(sizes) <= 1
        for mini in epoch:
            check_micro_batches(mini.micro_batches, home, lengths, budget)
    check_micro_batches(plan.scoring("reference"), home, lengths, budget)
    assert sorted(flatten(plan.scoring("reference"))) == kept


def check_micro_batches(micro_batches: MicroBatches, home: dict[int, int], lengths: list[int], budget: int) -> None:
    assert len({len(bins) for bins in micro_batches}) == 1
    for rank, bins in enumerate(micro_batches):
        for one in bins:
            assert sum(lengths[i] for i in one) <= budget
            assert one == sorted(one)
            assert all(home[i] == rank for i in one)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=50),
    world_size=st.integers(1, 5),
    num_mini_batches=st.integers(1, 5),
    ppo_epochs=st.integers(1, 3),
    max_tokens=st.integers(60, 150),
    micro_batch_size=st.none() | st.integers(1, 4),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_any_number_of_sequences_ranks_and_mini_batches(
    lengths: list[int],
    world_size: int,
    num_mini_batches: int,
    ppo_epochs: int,
    max_tokens: int,
    micro_batch_size: int | None,
    shuffle: bool,
    data: st.DataObject,
) -> None:
    excluded = data.draw(st.sets(st.integers(0, len(lengths) - 1))) if lengths else set()
    plans = [
        plan_iteration(
            lengths,
            world_size,
            num_mini_batches,
            ppo_epochs,
            max_tokens,
            seed=3,
            micro_batch_size=micro_batch_size,
            shuffle=shuffle,
            excluded=excluded,
        )
        for _ in range(2)
    ]

    assert plans[0] == plans[1]
    assert (len(plans[0].mini_batches), len(plans[0].mini_batches[0])) == (ppo_epochs, num_mini_batches)
    check_invariants(plans[0], lengths, max_tokens, [i for i in range(len(lengths)) if i not in excluded])
    if micro_batch_size is not None:
        bins = [one for epoch in plans[0].mini_batches for mini in epoch for rank in mini.micro_batches for one in rank]
        assert all(len(one) <= micro_batch_size for one in bins)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 30), min_size=1, max_size=9)), max_size=9),
    world_size=st.integers(1, 4),
    num_mini_batches=st.integers(1, 3),
    ppo_epochs=st.integers(1, 3),
    max_tokens=st.integers(60, 200),
    micro_batch_size=st.none() | st.integers(1, 4),
)
def test_shared_prompts_keep_groups_together_within_the_budget(
    groups: list[tuple[int, list[int]]],
    world_size: int,
    num_mini_batches: int,
    ppo_epochs: int,
    max_tokens: int,
    micro_batch_size: int | None,
) -> None:
    prompts = [prompt for prompt, responses in groups for _ in responses]
    lengths = [prompt + response for prompt, responses in groups for response in responses]
    group_ids = [f"g{number}" for number, (_, responses) in enumerate(groups) for _ in responses]

    plan = plan_iteration(
        lengths,
        world_size,
        num_mini_batches,
        ppo_epochs,
        max_tokens,
        seed=0,
        prompt_lengths=prompts,
        group_ids=group_ids,
        share_prompts=True,
        micro_batch_size=micro_batch_size,
        scoring_max_tokens={"reference": 60},
    )

    def cost(one: list[int]) -> int:
        shared = {group_ids[i]: prompts[i] for i in one}
        return sum(lengths[i] - prompts[i] for i in one) + sum(shared.values())

    for epoch in plan.mini_batches:
        members = [flatten(mini.micro_batches) for mini in epoch]
        assert sorted(i for one in members for i in one) == list(range(len(lengths)))
        # Each group is in one mini-batch only.
        assert sum(len({group_ids[i] for i in one}) for one in members) == len(groups)
        assert all(cost(one) <= max_tokens for mini in epoch for bins in mini.micro_batches for one in bins)
        assert all(len({len(bins) for bins in mini.micro_batches}) == 1 for mini in epoch)
    assert all(cost(one) <= 60 for bins in plan.scoring("reference") for one in bins)
    homes = [
        [sorted(i for mini in epoch for one in mini.micro_batches[r] for i in one) for r in range(world_size)]
        for epoch in plan.mini_batches
    ]
    assert all(home == plan.rank_sequences for home in homes)


# O17: not divisible, fewer than ranks, none.
def test_sequences_need_not_divide_by_ranks_or_mini_batches() -> None:
    sixty = plan_iteration([5] * 60, 8, 1, 1, 100, seed=0)
    two = plan_iteration([5, 5], 4, 1, 1, 100, seed=0)
    none = plan_iteration([], 4, 2, 1, 100, seed=0)

    assert sorted(map(len, sixty.rank_sequences)) == [7, 7, 7, 7, 8, 8, 8, 8]
    assert sorted(two.mini_batch(0, 0).micro_batches) == [[[]], [[]], [[0]], [[1]]]
    assert none.mini_batch(0, 1).micro_batches == [[], [], [], []]
    assert none.mini_batch(0, 1).num_sequences == 0


# O18
@pytest.mark.parametrize(("lengths", "cap", "count"), [([7] * 8, 8, 8), ([6, 5, 5, 4, 4], 12, 3)])
def test_token_cap_is_a_cap(lengths: list[int], cap: int, count: int) -> None:
    plan = plan_iteration(lengths, 1, 1, 1, cap, seed=0)

    bins = plan.mini_batch(0, 0).micro_batches[0]
    assert len(bins) == count
    assert sorted(i for one in bins for i in one) == list(range(len(lengths)))
    assert plan.metrics["plan/max_micro_batch_tokens"] == max(sum(lengths[i] for i in one) for one in bins) <= cap


# O19
def test_one_sequence_over_the_cap_is_named() -> None:
    message = r"data\.max_tokens_per_micro_batch=10 .* sample 0 has 12 tokens, the cap is 10"
    with pytest.raises(ValueError, match=message):
        plan_iteration([12, 3, 4], 1, 1, 1, 10, seed=0)
    with pytest.raises(ValueError, match=r"scoring_max_tokens\['reference'\]=11"):
        plan_iteration([12, 3, 4], 1, 1, 1, 12, seed=0, scoring_max_tokens={"reference": 11})


def test_sequence_parallel_ranks_and_exclusion_lift_the_cap() -> None:
    assert plan_iteration([12, 3, 4], 1, 1, 1, 10, seed=0, sequence_parallel_size=2).rank_sequences == [[0, 1, 2]]
    assert plan_iteration([12, 3, 4], 1, 1, 1, 10, seed=0, excluded=[0]).rank_sequences == [[1, 2]]


# O20: two ranks with two long and three short sequences run two micro-batches each, none empty.
def test_every_rank_runs_the_same_number_of_micro_batches() -> None:
    ranks = plan_iteration([8, 8, 2, 2, 2], 2, 1, 1, 8, seed=0).mini_batch(0, 0).micro_batches

    assert [len(bins) for bins in ranks] == [2, 2]
    assert all(one for bins in ranks for one in bins)


# O20, second half: a rank with one sequence gets an empty micro-batch.
def test_a_rank_with_too_few_sequences_gets_empty_micro_batches() -> None:
    plan = plan_iteration([8, 8, 2], 2, 1, 1, 8, seed=0)

    assert plan.mini_batch(0, 0).micro_batches == [[[0], [2]], [[1], []]]
    assert plan.metrics["plan/num_empty_micro_batches"] == 1
    # The dummy of two tokens over 18 useful ones.
    assert plan.metrics["plan/token_waste"] == pytest.approx(2 / 18)


def test_counts_are_global_and_leave_out_untrained_sequences() -> None:
    plan = plan_iteration([5, 6, 7, 8], 2, 1, 1, 20, seed=0, loss_tokens=[2, 0, 3, 4], group_ids=["a", "b", "a", "c"])

    mini = plan.mini_batch(0, 0)
    assert (mini.num_loss_tokens, mini.num_sequences, mini.num_groups) == (9, 3, 2)


def test_loss_tokens_default_to_what_follows_the_prompt() -> None:
    plan = plan_iteration([5, 6], 1, 1, 1, 20, seed=0, prompt_lengths=[2, 6])

    assert (plan.mini_batch(0, 0).num_loss_tokens, plan.mini_batch(0, 0).num_sequences) == (3, 1)


def test_without_shuffle_mini_batches_are_runs_of_the_input() -> None:
    plan = plan_iteration([4, 9, 2, 7, 5], 1, 2, 1, 30, seed=0, shuffle=False)

    assert [sorted(flatten(mini.micro_batches)) for mini in plan.mini_batches[0]] == [[0, 1, 2], [3, 4]]


def test_composition_depends_on_seed_and_epoch() -> None:
    lengths = lognormal_lengths(256)

    def members(seed: int, epoch: int) -> list[list[int]]:
        plan = plan_iteration(lengths, 2, 4, 3, 8192, seed=seed)
        return [sorted(flatten(mini.micro_batches)) for mini in plan.mini_batches[epoch]]

    compositions = [members(0, 0), members(0, 1), members(0, 2), members(1, 0), members(1, 1)]
    assert len({str(one) for one in compositions}) == 5
    assert members(-7, 0) == members(-7, 0)


def test_equal_lengths_are_shuffled_too() -> None:
    firsts = {
        str(flatten(plan_iteration([9] * 8, 1, 2, 1, 99, seed=s).mini_batch(0, 0).micro_batches)) for s in range(20)
    }

    assert len(firsts) > 5


@pytest.mark.parametrize("ppo_epochs", [1, 3])
def test_work_is_even_over_ranks_and_mini_batches(ppo_epochs: int) -> None:
    lengths = lognormal_lengths(1024)
    plan = plan_iteration(lengths, 8, 4, ppo_epochs, 8192, seed=0)

    assert plan.metrics["plan/rank_imbalance"] < 1.05
    for epoch in plan.mini_batches:
        tokens = [int(lengths[flatten(mini.micro_batches)].sum()) for mini in epoch]
        assert max(tokens) < 1.05 * min(tokens)


def test_plan_stays_valid_when_the_input_is_permuted() -> None:
    lengths = lognormal_lengths(200)
    order = np.random.default_rng(1).permutation(200)
    plans = [plan_iteration(one, 4, 3, 2, 8192, seed=0) for one in (lengths, lengths[order])]

    for plan, one in zip(plans, (lengths, lengths[order]), strict=True):
        check_invariants(plan, one.tolist(), 8192, list(range(200)))
        assert plan.metrics["plan/rank_imbalance"] < 1.1


def test_little_is_wasted_on_lognormal_lengths() -> None:
    plan = plan_iteration(lognormal_lengths(1024), 8, 1, 1, 8192, seed=0)

    assert plan.metrics["plan/token_waste"] < 0.03
    assert plan.metrics["plan/fill_ratio"] > 0.9


def test_passes_have_budgets_of_their_own() -> None:
    plan = plan_iteration([10] * 8, 1, 1, 1, 20, seed=0, scoring_max_tokens={"old_log_prob": 40, "critic": 10})

    counts = {name: len(plan.scoring(name)[0]) for name in ("old_log_prob", "critic", "reference")}
    assert counts == {"old_log_prob": 2, "critic": 8, "reference": 4}


def test_fixed_size_takes_consecutive_runs() -> None:
    plan = plan_iteration([3, 9, 1, 4, 4], 1, 1, 1, 100, seed=0, shuffle=False, micro_batch_size=2)

    assert plan.mini_batch(0, 0).micro_batches == [[[0, 1], [2, 3], [4]]]


def test_a_group_over_the_budget_pays_its_prompt_again() -> None:
    # Prompt 10 and four responses of 10 cost 50; with 30 tokens two fit at a time, so the prompt is computed twice.
    arguments = dict(prompt_lengths=[10] * 4, group_ids=["a"] * 4, share_prompts=True)
    whole = plan_iteration([20] * 4, 1, 1, 1, 50, 0, **arguments)
    split = plan_iteration([20] * 4, 1, 1, 1, 30, 0, **arguments)

    assert whole.mini_batch(0, 0).micro_batches == [[[0, 1, 2, 3]]]
    assert whole.metrics["plan/token_waste"] == 0
    assert [len(one) for one in split.mini_batch(0, 0).micro_batches[0]] == [2, 2]
    assert split.metrics["plan/token_waste"] == pytest.approx(10 / 50)


def test_a_group_is_split_rather_than_leave_a_rank_idle() -> None:
    plan = plan_iteration([20] * 4, 2, 1, 1, 100, 0, prompt_lengths=[10] * 4, group_ids=["a"] * 4, share_prompts=True)

    assert [len(members) for members in plan.rank_sequences] == [2, 2]


def test_shared_prompts_of_one_group_must_agree() -> None:
    with pytest.raises(ValueError, match="sample 1 has a prompt of 6 tokens"):
        plan_iteration([9, 9], 1, 1, 1, 20, 0, prompt_lengths=[5, 6], group_ids=[0, 0], share_prompts=True)
    with pytest.raises(ValueError, match="needs prompt_lengths and group_ids"):
        plan_iteration([9, 9], 1, 1, 1, 20, 0, share_prompts=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"excluded": [5]}, "excluded"),
        ({"lengths": [1, -2]}, "lengths: sequence 1"),
        ({"loss_tokens": [1]}, "loss_tokens has 1 entries for 2"),
        ({"group_ids": [1]}, "group_ids has 1 entries for 2"),
        ({"prompt_lengths": [3, 3]}, "prompt_lengths"),
    ],
)
def test_wrong_arguments_are_named(changes: dict, message: str) -> None:
    arguments = dict(lengths=[2, 2], world_size=1, num_mini_batches=1, ppo_epochs=1, max_tokens=9, seed=0)
    with pytest.raises(ValueError, match=message):
        plan_iteration(**(arguments | changes))


def test_plan_cannot_be_changed() -> None:
    plan = plan_iteration([1], 1, 1, 1, 9, seed=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.world_size = 2
