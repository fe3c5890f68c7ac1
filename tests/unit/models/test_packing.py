import pytest
import torch

from lit_rl.models.packing import pack, unpack

PROMPT = [7, 8]
RESPONSES = [[1, 2, 3], [4], []]
MASKS = [[1, 0, 1], [1], []]


def test_sequences_restart_their_positions_and_end_before_their_last_target() -> None:
    packed = pack([PROMPT] * 3, RESPONSES, MASKS, share_prompts=False)

    # Sequence 0: prompt and its first two tokens (3 is a target only). Sequence 1: prompt alone. Sequence 2: nothing.
    assert packed.input_ids.tolist() == [[7, 8, 1, 2, 7, 8]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert packed.attention_mask is None
    assert packed.source_index.tolist() == [1, 3, 5]
    assert packed.target_ids.tolist() == [1, 3, 4]
    assert packed.shape == (3, 3)


def test_neighbours_of_one_group_share_their_prompt() -> None:
    packed = pack([PROMPT] * 2, [[1, 2, 3], [4, 5]], [[1, 1, 1], [0, 1]], group_ids=[0, 0], share_prompts=True)

    assert packed.input_ids.tolist() == [[7, 8, 1, 2, 4]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert packed.source_index.tolist() == [1, 2, 3, 4]
    assert packed.target_ids.tolist() == [1, 2, 3, 5]
    assert packed.attention_mask is not None
    # Token 4 sees the prompt and itself, not the other response.
    assert packed.attention_mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_groups_with_equal_prompts_do_not_share() -> None:
    packed = pack([PROMPT] * 2, [[1], [4]], [[1], [1]], group_ids=[0, 1], share_prompts=True)

    assert packed.input_ids.tolist() == [[7, 8, 7, 8]]
    assert packed.attention_mask is None


def test_unpack_puts_values_back_and_is_differentiable() -> None:
    packed = pack([PROMPT] * 3, RESPONSES, MASKS, share_prompts=True)
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    padded = unpack(values, packed)

    assert padded.tolist() == [[1, 0, 2], [3, 0, 0], [0, 0, 0]]
    (padded * torch.tensor([[1.0, 5, 2], [3, 5, 5], [5, 5, 5]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 2, 3]


def test_an_empty_micro_batch_keeps_one_filler_token() -> None:
    packed = pack([], [], [], share_prompts=True)

    assert packed.num_tokens == 1
    assert packed.num_targets == 0
    assert unpack(torch.zeros(0), packed).shape == (0, 0)


def test_tensors_are_taken_like_lists() -> None:
    packed = pack([torch.tensor(PROMPT)], [torch.tensor([1, 2])], [torch.tensor([True, True])], share_prompts=False)

    assert packed.input_ids.tolist() == [[7, 8, 1]]


def test_an_empty_prompt_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Sequence 1 has an empty prompt"):
        pack([PROMPT, []], [[1], [2]], [[1], [1]], share_prompts=False)


def test_a_mask_of_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequence 0: response_mask has 1 entries for 2"):
        pack([PROMPT], [[1, 2]], [[1]], share_prompts=False)
