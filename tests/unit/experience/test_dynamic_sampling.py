"""Groups without spread are replaced by fresh ones, up to a bound."""

from __future__ import annotations

import pytest

from lit_rl.experience.dynamic_sampling import sample_until_spread
from lit_rl.types import Prompt, Trajectory


def prompts(names):
    return [Prompt(row_id=name, messages=[], data_source="s") for name in names]


def run(first, fresh, max_rounds):
    """Rows named after the rewards of their group: "01" has rewards 0 and 1, "x" is a failed trajectory."""
    remaining = iter(fresh)
    numbers = []

    def roll_out(rows, first_number):
        numbers.append((first_number, [row.row_id for row in rows]))
        return [
            Trajectory(
                row_id=row.row_id, group_id=f"{first_number + i}:{row.row_id}", prompt_ids=[1], response_ids=[],
                loss_mask=[], rollout_logprobs=[], policy_versions=[], reward=None if one == "x" else float(one),
            )
            for i, row in enumerate(rows)
            for one in row.row_id
        ]  # fmt: skip

    sampled = sample_until_spread(
        prompts(first), roll_out, lambda num: prompts([next(remaining) for _ in range(num)]), max_rounds
    )
    return sampled, numbers


def test_groups_of_equal_rewards_are_replaced_until_all_have_spread():
    sampled, numbers = run(["01", "11", "00"], ["00", "10", "01"], max_rounds=5)

    assert numbers == [(0, ["01", "11", "00"]), (3, ["00", "10"]), (5, ["01"])]
    assert [t.group_id for t in sampled.kept[::2]] == ["0:01", "4:10", "5:01"]
    assert len(sampled.everything) == 12
    assert sampled.metrics == {
        "rollout/dynamic_sampling/rounds": 2.0,
        "rollout/dynamic_sampling/num_groups": 6.0,
        "rollout/dynamic_sampling/missing_groups": 0.0,
    }


def test_what_is_missing_after_the_last_round_stays_missing():
    sampled, numbers = run(["01", "11"], ["00"], max_rounds=1)

    assert len(numbers) == 2
    assert {t.group_id for t in sampled.kept} == {"0:01"}
    assert sampled.metrics["rollout/dynamic_sampling/missing_groups"] == 1.0


@pytest.mark.parametrize("max_rounds", [0, 1])
def test_without_any_spread_the_first_groups_are_kept(max_rounds):
    sampled, _ = run(["11", "00"], ["00", "11"], max_rounds)

    assert [t.row_id for t in sampled.kept] == ["11", "11", "00", "00"]


def test_a_failed_trajectory_is_no_reward():
    # One usable reward has no spread; two that differ have, whatever failed beside them.
    sampled, numbers = run(["0x", "x01"], ["10"], max_rounds=1)

    assert numbers[1] == (2, ["10"])
    assert {t.row_id for t in sampled.kept} == {"x01", "10"}
