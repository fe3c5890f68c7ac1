"""Experience, mini-batches and micro-batches on a small example worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lit_rl.experience.batch import Experience, MicroBatch, MiniBatch
from lit_rl.experience.plan import plan_iteration
from lit_rl.types import Trajectory

CPU = torch.device("cpu")


def trajectory(group: str, prompt: list[int], response: list[int], mask: list[int], reward: float) -> Trajectory:
    return Trajectory(
        row_id=group, group_id=group, prompt_ids=prompt, response_ids=response, loss_mask=mask,
        rollout_logprobs=[-0.5 * token * m for token, m in zip(response, mask, strict=True)],
        policy_versions=[0 if m else -1 for m in mask], reward=reward,
    )  # fmt: skip


def three() -> list[Trajectory]:
    """Two of one group (3 tokens with a tool token, and 1 token), and an empty response of another."""
    return [
        trajectory("a", [1, 2], [4, 5, 6], [1, 0, 1], 1.0),
        trajectory("a", [1, 2], [7], [1], 0.0),
        trajectory("b", [3], [], [], 0.5),
    ]


def make_experience(
    trajectories: list[Trajectory], *, num_mini_batches: int = 1, ppo_epochs: int = 1, **options: Any
) -> Experience:
    numbers = {group: i for i, group in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
    group_ids = [numbers[t.group_id] for t in trajectories]
    plan = plan_iteration(
        [t.length for t in trajectories], 1, num_mini_batches, ppo_epochs, options.pop("max_tokens", 100), 0,
        loss_tokens=[t.num_loss_tokens for t in trajectories],
        prompt_lengths=[len(t.prompt_ids) for t in trajectories], group_ids=group_ids, share_prompts=False, **options,
    )  # fmt: skip
    return Experience(
        iteration=0, temperature=1.0, plan=plan, trajectories=trajectories, indices=range(len(trajectories)),
        rewards=torch.tensor([t.reward for t in trajectories]), group_ids=torch.tensor(group_ids),
        loss_tokens=torch.tensor([t.num_loss_tokens for t in trajectories]), share_prompts=False,
    )  # fmt: skip


def test_columns_are_padded_to_the_longest_response_with_zeros() -> None:
    experience = make_experience(three())

    assert experience.padded("rollout_logprobs", [0, 1, 2]).tolist() == [[-2.0, 0, -3.0], [-3.5, 0, 0], [0, 0, 0]]
    assert experience.loss_mask([0, 1, 2]).tolist() == [[True, False, True], [True, False, False], [False] * 3]
    # Padding follows what is asked for, and so does the order.
    assert experience.padded("rollout_logprobs", [2, 1]).tolist() == [[0.0], [-3.5]]
    assert experience.loss_mask([2]).shape == (1, 0)


def test_no_trajectories_give_an_empty_mask_of_the_right_type() -> None:
    experience = make_experience(three())

    assert experience.loss_mask([]).shape == (0, 0)
    assert experience.loss_mask([]).dtype == torch.bool
    assert experience.padded("rollout_logprobs", []).dtype == torch.float32


def test_stored_values_come_back_without_what_lay_in_the_padding() -> None:
    experience = make_experience(three())
    values = torch.arange(6.0, requires_grad=True).reshape(2, 3) + 1

    experience.store("old_logprobs", [1, 0], values)

    assert experience.padded("old_logprobs", [0, 1]).tolist() == [[4.0, 5.0, 6.0], [1.0, 0.0, 0.0]]
    assert not experience.columns["old_logprobs"][0].requires_grad
    values.data.zero_()
    assert experience.padded("old_logprobs", [1]).tolist() == [[1.0]]


def test_one_advantage_per_trajectory_spreads_over_its_tokens_by_global_index() -> None:
    trajectories = three()
    experience = make_experience(trajectories)
    # This rank holds the trajectories 3, 5 and 7 of eight.
    shifted = Experience(
        iteration=0, temperature=1.0, plan=experience.plan, trajectories=trajectories, indices=[3, 5, 7],
        rewards=torch.zeros(8), group_ids=torch.arange(8), loss_tokens=torch.ones(8),
    )  # fmt: skip
    shifted.advantages = torch.arange(8.0)

    assert shifted.local([7, 3]) == [2, 0]
    assert shifted.advantages_of([0, 2], 3).tolist() == [[3.0] * 3, [7.0] * 3]
    assert shifted.has_weight(5)


def test_advantages_per_token_are_taken_as_they_are() -> None:
    experience = make_experience(three())
    experience.advantages = torch.tensor([[1.0, 0.0, -1.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])

    assert experience.advantages_of([1], 1).tolist() == [[2.0]]
    assert experience.advantages_of([0, 2], 3).tolist() == [[1.0, 0.0, -1.0], [0.0] * 3]


# O22: what cannot move the weights must not count as weight.
@pytest.mark.parametrize(
    ("advantages", "expected"),
    [
        (torch.tensor([1.0, 0.0, 3.0]), [True, False, False]),  # the last one has no tokens
        (torch.tensor([[0.0, 5.0, 0.0], [1.0, 0.0, 0.0], [9.0, 9.0, 9.0]]), [False, True, False]),  # 5 is a tool's
        (torch.tensor([[0.0, 0.0, 2.0], [0.0, 7.0, 7.0], [0.0, 0.0, 0.0]]), [True, False, False]),  # 7 is padding
    ],
)
def test_a_trajectory_has_weight_where_a_sampled_token_has_an_advantage(
    advantages: torch.Tensor, expected: list[bool]
) -> None:
    experience = make_experience(three())
    experience.advantages = advantages

    assert [experience.has_weight(index) for index in range(3)] == expected


def test_a_micro_batch_holds_its_trajectories_in_order() -> None:
    experience = make_experience(three())
    experience.store("old_logprobs", [0, 1, 2], torch.full((3, 3), -1.0))
    experience.advantages = torch.tensor([0.5, -0.5, 0.0])

    batch = MicroBatch(experience, [1, 0], CPU)

    assert batch.loss_mask.tolist() == [[True, False, False], [True, False, True]]
    assert batch.rollout_logprobs.tolist() == [[-3.5, 0.0, 0.0], [-2.0, 0.0, -3.0]]
    assert batch.old_logprobs.tolist() == [[-1.0, 0.0, 0.0], [-1.0] * 3]
    assert batch.ref_logprobs is None
    assert batch.advantages.tolist() == [[-0.5] * 3, [0.5] * 3]
    assert batch.packed.shape == (2, 3)
    # The last wanted token of a response is only a target: 2 + 0 and 2 + 2 tokens are computed.
    assert batch.packed.input_ids.tolist() == [[1, 2, 1, 2, 4, 5]]
    assert batch.packed.target_ids.tolist() == [7, 4, 6]


def test_an_empty_micro_batch_has_no_rows() -> None:
    experience = make_experience(three())
    experience.advantages = torch.zeros(3)

    batch = MicroBatch(experience, [], CPU)

    assert batch.loss_mask.shape == batch.rollout_logprobs.shape == batch.advantages.shape == (0, 0)
    assert batch.packed.shape == (0, 0)


def test_mini_batches_know_their_place_in_the_iteration() -> None:
    experience = make_experience(three(), num_mini_batches=2, ppo_epochs=2)
    batches = [MiniBatch(experience, epoch, index, 0) for epoch in range(2) for index in range(2)]

    assert [batch.is_first for batch in batches] == [True, False, False, False]
    assert [batch.is_last for batch in batches] == [False, False, False, True]
    for epoch in (batches[:2], batches[2:]):
        assert sorted(i for batch in epoch for indices in batch.indices for i in indices) == [0, 1, 2]


def test_micro_batches_are_those_of_the_plan_and_the_last_is_marked() -> None:
    experience = make_experience(three(), micro_batch_size=1)
    batches = list(MiniBatch(experience, 0, 0, 0).micro_batches())

    assert sorted(position for batch, _ in batches for position in batch.positions) == [0, 1, 2]
    assert [is_last for _, is_last in batches] == [False, False, True]


def test_trajectories_without_weight_are_left_out_and_so_are_micro_batches_left_empty() -> None:
    experience = make_experience([*three(), trajectory("c", [9], [8], [1], 0.0)], micro_batch_size=1)
    experience.advantages = torch.tensor([0.5, 0.0, 1.0, -0.5])
    mini_batch = MiniBatch(experience, 0, 0, 0)

    kept = list(mini_batch.micro_batches(mini_batch.weighted_indices()))

    assert sorted(position for batch, _ in kept for position in batch.positions) == [0, 3]
    assert [is_last for _, is_last in kept] == [False, True]
    assert len(list(mini_batch.micro_batches())) == 4
    experience.advantages = torch.zeros(4)
    assert list(mini_batch.micro_batches(mini_batch.weighted_indices())) == []


def test_a_mini_batch_without_a_trajectory_has_no_micro_batch() -> None:
    experience = make_experience(three()[:1], num_mini_batches=3)
    batches = [MiniBatch(experience, 0, index, 0) for index in range(3)]

    assert sorted(len(list(batch.micro_batches())) for batch in batches) == [0, 0, 1]
    assert sorted(batch.plan.num_loss_tokens for batch in batches) == [0, 0, 2]


def test_an_iteration_without_a_trajectory_still_has_its_mini_batches() -> None:
    experience = make_experience([], num_mini_batches=2)

    assert len(experience) == 0
    assert [list(MiniBatch(experience, 0, index, 0).micro_batches()) for index in range(2)] == [[], []]


def test_prompt_weights_give_every_prompt_with_tokens_the_same_weight() -> None:
    # Group a has 2 + 1 sampled tokens, b none, c one: two prompts with tokens, so 1/(2*3) per token of a, 1/2 of c.
    experience = make_experience([*three(), trajectory("c", [9], [8], [1], 0.0)], micro_batch_size=2)
    mini_batch = MiniBatch(experience, 0, 0, 0)

    weights = {}
    for batch, _ in mini_batch.micro_batches():
        weights |= dict(zip(batch.positions, mini_batch.prompt_weights(batch).tolist(), strict=True))

    assert weights == pytest.approx({0: 1 / 6, 1: 1 / 6, 2: 0.0, 3: 1 / 2})


def test_moving_a_mini_batch_moves_no_tensor_of_the_experience() -> None:
    experience = make_experience(three())
    mini_batch = MiniBatch(experience, 0, 0, 0).to("meta")

    ((batch, _),) = mini_batch.micro_batches()
    assert batch.loss_mask.device.type == batch.packed.input_ids.device.type == "meta"
    assert experience.columns["rollout_logprobs"][0].device.type == "cpu"
