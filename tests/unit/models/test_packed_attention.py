import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import lit_rl.models.packed_attention as module
from lit_rl.models.packed_attention import packed_attention
from lit_rl.models.packing import PackedSequences, pack

NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 8


def two_groups() -> PackedSequences:
    return pack(
        [[7, 8, 9]] * 3 + [[5, 6]] * 2,
        [[1] * 6, [2] * 3, [3]] + [[4] * 2, [5] * 5],
        [[1] * 6, [1] * 3, [1]] + [[1] * 2, [0, 0, 1, 1, 1]],
        group_ids=[0, 0, 0, 1, 1],
        share_prompts=True,
    )


def inputs(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def heads(count: int) -> Tensor:
        # Laid out as networks do: heads inside tokens.
        values = torch.randn(1, length, count, HEAD_DIM, generator=generator).to(dtype)
        return values.transpose(1, 2).requires_grad_()

    return heads(NUM_HEADS), heads(NUM_KEY_HEADS), heads(NUM_KEY_HEADS)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    return output.transpose(1, 2)


@pytest.mark.parametrize("max_keys", [768, 4], ids=["kept probabilities", "kernel"])
def test_segments_equal_a_mask_over_the_whole_row(monkeypatch: pytest.MonkeyPatch, max_keys: int) -> None:
    monkeypatch.setattr(module, "_MAX_KEYS", max_keys)
    packed = two_groups()
    query, key, value = inputs(packed.num_tokens)
    upstream = torch.randn(1, packed.num_tokens, NUM_HEADS, HEAD_DIM)
    assert packed.attention_mask is not None
    expected = masked_attention(query, key, value, packed.attention_mask)
    expected_grads = torch.autograd.grad((expected * upstream).sum(), (query, key, value))

    actual = packed_attention(query, key, value, packed.segments, scaling=0.3)
    actual_grads = torch.autograd.grad((actual * upstream).sum(), (query, key, value))

    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=0, atol=5e-6)


def test_bfloat16_is_as_close_to_float32_as_the_kernel() -> None:
    packed = two_groups()
    query, key, value = inputs(packed.num_tokens)
    low = [x.detach().bfloat16().requires_grad_() for x in (query, key, value)]
    upstream = torch.randn(1, packed.num_tokens, NUM_HEADS, HEAD_DIM)
    mask = packed.attention_mask
    assert mask is not None
    exact = torch.autograd.grad((masked_attention(query, key, value, mask) * upstream).sum(), (query, key, value))
    kernel = torch.autograd.grad((masked_attention(*low, mask) * upstream).sum(), low)
    ours = torch.autograd.grad((packed_attention(*low, packed.segments, 0.3) * upstream).sum(), low)

    for a, b, c in zip(exact, kernel, ours, strict=True):
        assert (a - c).norm() < 1.5 * (a - b).norm()
