"""Buckets of named full tensors: sizes, order, ties, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lit_rl.weight_sync.source import stream_weights


class Odd(nn.Module):
    """Parameters of 8, 3, 40, 4 and 1 elements, a tie, a non-contiguous one, and what is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(8.0).reshape(2, 4))
        self.second = nn.Parameter(torch.arange(3.0, dtype=torch.float64))
        self.large = nn.Parameter(torch.arange(40.0).reshape(8, 5).T)
        self.tied = self.first
        self.frozen = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.5, dtype=torch.bfloat16))
        self.register_buffer("inv_freq", torch.ones(5))


def names(buckets: list[list[tuple[str, Tensor]]]) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in buckets]


# A29: tensors smaller than, equal to and larger than a bucket (4 bytes an element here).
@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [
        (10_000, [["first", "second", "large", "frozen", "scalar"]]),
        (44, [["first", "second"], ["large"], ["frozen", "scalar"]]),  # 32 + 12 bytes fill the first exactly
        (43, [["first"], ["second"], ["large"], ["frozen", "scalar"]]),
        (160, [["first", "second"], ["large"], ["frozen", "scalar"]]),
        (4, [["first"], ["second"], ["large"], ["frozen"], ["scalar"]]),
    ],
)
def test_buckets_hold_whole_tensors_in_order_up_to_their_size(bucket_bytes: int, expected: list[list[str]]) -> None:
    assert names(list(stream_weights(Odd(), bucket_bytes, torch.float32))) == expected


def test_sizes_count_in_the_receivers_dtype() -> None:
    # In bfloat16 the same tensors take half of their float32 bytes.
    assert names(list(stream_weights(Odd(), 22, torch.bfloat16))) == [
        ["first", "second"],
        ["large"],
        ["frozen", "scalar"],
    ]


# A29: odd dtypes.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_detached_contiguous_and_in_the_receivers_dtype(dtype: torch.dtype) -> None:
    network = Odd()
    sent = dict(pair for bucket in stream_weights(network, 50, dtype) for pair in bucket)

    assert list(sent) == [name for name, _ in network.named_parameters()]
    for name, tensor in sent.items():
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        torch.testing.assert_close(tensor, network.get_parameter(name).detach().to(dtype), rtol=0, atol=0)


def test_tied_weights_come_once_under_their_first_name(tiny_causal_lm: nn.Module) -> None:
    sent = dict(pair for bucket in stream_weights(tiny_causal_lm, 1 << 20, torch.float32) for pair in bucket)

    assert tiny_causal_lm.lm_head.weight is tiny_causal_lm.model.embed_tokens.weight
    assert "model.embed_tokens.weight" in sent
    assert "lm_head.weight" not in sent


def test_ranks_that_do_not_send_get_as_many_buckets_without_tensors() -> None:
    assert list(stream_weights(Odd(), 44, torch.float32, is_sender=False)) == [[], [], []]


def test_a_network_without_parameters_has_no_bucket() -> None:
    assert list(stream_weights(nn.Identity(), 44, torch.float32)) == []


def test_sharded_parameters_are_gathered_on_every_rank() -> None:
    gathered: list[str] = []

    class Shard(nn.Parameter):
        """Stands for a DTensor: only its gathered form is whole."""

        def full_tensor(self) -> Tensor:
            gathered.append("rank")
            return torch.full((4,), 2.0)

        def detach(self) -> Shard:
            return self

    network = nn.Module()
    network.register_parameter("weight", Shard(torch.zeros(4)))

    ((sent,),) = stream_weights(network, 100, torch.float32)
    assert sent[0] == "weight"
    assert sent[1].tolist() == [2.0] * 4
    assert list(stream_weights(network, 100, torch.float32, is_sender=False)) == [[]]
    assert len(gathered) == 2
