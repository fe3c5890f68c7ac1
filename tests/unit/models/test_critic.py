"""The packed critic against its own backbone, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.models import Critic, pack

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5]]
RESPONSES = [[6, 7, 8, 9], [10, 11], [12]]
MASKS = [[1, 0, 1, 1], [1, 1], [1]]


def make_critic(**options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, attn_implementation="sdpa",
    )  # fmt: skip
    return Critic(LlamaForCausalLM(config), **options)


@pytest.mark.parametrize("share_prompts", [False, True])
def test_packed_values_equal_those_of_single_sequences(share_prompts):
    critic = make_critic()
    packed = pack(PROMPTS, RESPONSES, MASKS, group_ids=[0, 0, 1], share_prompts=share_prompts)

    values = critic(packed)

    assert values.shape == (3, 4)
    assert values.dtype == torch.float32
    for row, (prompt, response, mask) in enumerate(zip(PROMPTS, RESPONSES, MASKS, strict=True)):
        hidden = critic.backbone(torch.tensor([prompt + response])).last_hidden_state[0, len(prompt) - 1 : -1]
        expected = critic.value_head(hidden)[:, 0] * torch.tensor(mask)
        torch.testing.assert_close(values[row, : len(response)], expected, atol=1e-6, rtol=1e-4)


def test_values_begin_near_zero_and_the_same_in_every_run():
    first = make_critic()
    torch.manual_seed(5)
    second = Critic(first.backbone)

    values = first(pack(PROMPTS, RESPONSES, MASKS, share_prompts=False))

    assert 0 < values.abs().max() < 0.1
    assert torch.equal(first.value_head.weight, second.value_head.weight)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_every_parameter_has_a_gradient_even_without_a_wanted_token(gradient_checkpointing):
    critic = make_critic(gradient_checkpointing=gradient_checkpointing).train()

    critic(pack(PROMPTS, RESPONSES, [[0] * len(mask) for mask in MASKS], share_prompts=False)).sum().backward()

    assert all(p.grad is not None for p in critic.parameters())


def test_the_bf16_copy_gives_the_same_values_and_moves_gradients_to_float32():
    exact, critic = make_critic(), make_critic()
    critic.enable_bf16_working_copy()
    packed = pack(PROMPTS, RESPONSES, MASKS, group_ids=[0, 0, 1], share_prompts=True)

    values = critic(packed)
    values.sum().backward()

    torch.testing.assert_close(values, exact(packed), atol=2e-3, rtol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in critic.parameters())
