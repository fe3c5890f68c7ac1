import pytest
import torch
from tiny_models import tiny_llama
from torch import nn

from lit_rl.models.actor import Actor
from lit_rl.models.packing import PackedSequences, pack
from lit_rl.models.working_copy import Bf16WorkingCopy


def batch(shift: int = 0) -> PackedSequences:
    return pack([[3, 1 + shift]] * 2, [[4, 1, 5], [9, 2]], [[1, 1, 1], [1, 1]], share_prompts=True)


def test_the_copy_is_bfloat16_tied_and_keeps_float32_buffers() -> None:
    network = tiny_llama()
    low = Bf16WorkingCopy(network).network

    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in network.parameters()} == {torch.float32}
    assert low.lm_head.weight is low.model.embed_tokens.weight
    assert low.model.rotary_emb.inv_freq.dtype == torch.float32


def test_the_copy_is_in_no_state() -> None:
    actor = Actor(tiny_llama())
    keys, num_parameters = list(actor.state_dict()), len(list(actor.parameters()))
    actor.enable_bf16_working_copy()

    assert list(actor.state_dict()) == keys
    assert len(list(actor.parameters())) == num_parameters


def test_gradients_arrive_in_float32_on_the_registered_parameters() -> None:
    exact, low = Actor(tiny_llama()), Actor(tiny_llama())
    low.enable_bf16_working_copy()
    for actor in (exact, low):
        actor(batch()).logprobs.sum().backward()

    for a, b in zip(exact.parameters(), low.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert b.grad.dtype == torch.float32
        assert (a.grad - b.grad).norm() < 0.05 * a.grad.norm()
    assert all(p.grad is None for p in low.working_copy.network.parameters())


def test_micro_batches_are_summed_in_float32() -> None:
    def gradients(batches: list[PackedSequences]) -> list[torch.Tensor]:
        actor = Actor(tiny_llama())
        actor.enable_bf16_working_copy()
        for packed in batches:
            actor(packed).logprobs.sum().backward()
        return [p.grad for p in actor.parameters()]

    separate = [a + b for a, b in zip(gradients([batch(0)]), gradients([batch(5)]), strict=True)]

    torch.testing.assert_close(gradients([batch(0), batch(5)]), separate, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_an_optimizer_step_reaches_the_copy(fused: bool) -> None:
    actor = Actor(tiny_llama())
    actor.enable_bf16_working_copy()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=0.1, fused=fused)
    actor(batch()).logprobs.sum().backward()
    optimizer.step()

    for master, low in zip(actor.network.parameters(), actor.working_copy.network.parameters(), strict=True):
        torch.testing.assert_close(low, master.bfloat16(), rtol=0, atol=0)


def test_loaded_weights_reach_the_copy() -> None:
    actor = Actor(tiny_llama())
    actor.enable_bf16_working_copy()
    actor.load_state_dict({name: value + 1 for name, value in actor.state_dict().items()})

    for master, low in zip(actor.network.parameters(), actor.working_copy.network.parameters(), strict=True):
        torch.testing.assert_close(low, master.bfloat16(), rtol=0, atol=0)


def test_frozen_parameters_get_no_gradient() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].requires_grad_(False)
    Bf16WorkingCopy(network).network(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()

    assert network[0].weight.grad is None
    assert network[1].weight.grad is not None
