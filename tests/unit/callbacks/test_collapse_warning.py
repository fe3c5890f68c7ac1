"""What is said about a policy that collapses, and that nothing is said about one that does not."""

from __future__ import annotations

import pytest
import torch

from lit_rl.callbacks import CollapseWarning

HEALTHY = {
    "actor/entropy": 0.5,
    "rollout_corr/logprob_gap_mean": 0.01,
    "response_length/mean": 100.0,
    "critic/zero_spread_group_share": 0.3,
    "critic/score/mean": 0.6,
}


def watch(window: int, *iterations: dict[str, float]) -> list[list[str]]:
    callback = CollapseWarning(window=window)
    return [callback.watch({**HEALTHY, **changes}) for changes in iterations]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor/entropy": 0.001}, "actor/entropy is 0.0010, below 0.005"),
        ({"rollout_corr/logprob_gap_mean": 0.3}, "gap_mean is 0.300, above 0.1"),
        ({"response_length/mean": 500.0}, "response_length/mean is 500, 5.0 times that of the first iterations (100)"),
        ({"response_length/mean": 20.0}, "response_length/mean is 20, 0.2 times"),
        ({"critic/zero_spread_group_share": 1.0}, "zero_spread_group_share is 1.00, above 0.9"),
        ({"critic/score/mean": 0.1}, "critic/score/mean is 0.10, its best was 0.60"),
    ],
)
def test_each_sign_is_said_once_until_it_has_gone(changes: dict[str, float], words: str) -> None:
    said = watch(1, {}, changes, changes, {}, changes)
    assert [len(messages) for messages in said] == [0, 1, 0, 0, 1]
    assert words in said[1][0]


def test_a_healthy_run_and_a_single_bad_iteration_are_not_remarked_upon() -> None:
    once = {"response_length/mean": 250.0, "critic/zero_spread_group_share": 1.0, "critic/score/mean": 0.2}
    assert watch(2, {}, {}, once, {}) == [[]] * 4
    assert [len(messages) for messages in watch(2, {}, {}, once, once)] == [0, 0, 0, 3]


def test_what_is_not_logged_is_not_judged_and_tensors_are_read() -> None:
    callback = CollapseWarning(window=1)
    assert callback.watch({}) == []
    assert len(callback.watch({"actor/entropy": torch.tensor(0.0)})) == 1


def test_options_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="window=0 must be at least 1"):
        CollapseWarning(window=0)
    with pytest.raises(ValueError, match="max_length_factor=1 must be above 1"):
        CollapseWarning(max_length_factor=1)
