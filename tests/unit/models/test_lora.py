from __future__ import annotations

import copy
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.models.actor import Actor
from lit_rl.models.lora import LoraSettings, add_lora, merge_lora, weight_parts
from lit_rl.models.packing import PackedSequences, pack
from lit_rl.models.reference import AdapterFreeActor, Reference
from lit_rl.weight_sync.source import stream_weights


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


def batch() -> PackedSequences:
    return pack([[3, 1]] * 2 + [[5]], [[4, 1, 5], [9, 2], [7, 7]], [[1, 1, 1], [1, 0], [1, 1]], share_prompts=True)


def adapted(settings: LoraSettings | None = None, *, is_trained: bool = True) -> LlamaForCausalLM:
    """The same network with adapters, of random numbers where it shall have been trained."""
    network = tiny_llama()
    add_lora(network, settings or LoraSettings(r=4, alpha=6.0))
    if is_trained:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in network.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.1)
    return network


def logprobs(network: LlamaForCausalLM) -> torch.Tensor:
    return Actor(network)(batch()).logprobs


def merged(network: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in stream_weights(network, 4000, torch.float32) for name, tensor in bucket}


def test_adapters_begin_as_nothing_and_are_all_that_is_trained() -> None:
    network = adapted(is_trained=False)

    torch.testing.assert_close(logprobs(network), logprobs(tiny_llama()))
    trained = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of seven linear layers in two blocks
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)


def test_weights_leave_merged_and_under_their_usual_names() -> None:
    network = adapted()
    plain = tiny_llama()

    weights = merged(network)

    assert list(weights) == [name for name, _ in plain.named_parameters()]
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(logprobs(plain), logprobs(network))
    assert not torch.allclose(logprobs(plain), logprobs(tiny_llama()), atol=1e-2)
    assert [part.name for part in weight_parts(tiny_llama())] == list(weights)


def test_merging_takes_the_adapters_off() -> None:
    network = adapted()
    expected = logprobs(network)

    merge_lora(network)

    assert [name for name, _ in network.named_parameters()] == [name for name, _ in tiny_llama().named_parameters()]
    torch.testing.assert_close(logprobs(network), expected)


def test_gradients_of_the_adapters_follow_from_those_of_the_weights() -> None:
    network = adapted()
    plain = tiny_llama()
    plain.load_state_dict(merged(network), strict=False)

    Actor(network)(batch()).logprobs.sum().backward()
    Actor(plain)(batch()).logprobs.sum().backward()

    # W = W0 + s B A, so dB = s dW A^T and dA = s B^T dW.
    layer, weight = network.model.layers[1].mlp.up_proj, plain.model.layers[1].mlp.up_proj.weight
    down, up, scale = layer.lora_A["default"].weight, layer.lora_B["default"].weight, 6.0 / 4
    torch.testing.assert_close(up.grad, scale * weight.grad @ down.detach().T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(down.grad, scale * up.detach().T @ weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_copy", [False, True])
def test_the_reference_is_the_actor_without_adapters(has_copy: bool) -> None:
    actor = Actor(adapted())
    if has_copy:
        actor.enable_bf16_working_copy()
    original = Reference(tiny_llama(), dtype=torch.bfloat16 if has_copy else None)
    before = actor(batch()).logprobs.detach()

    scores = AdapterFreeActor(actor).score(batch())

    torch.testing.assert_close(scores, original.score(batch()))
    torch.testing.assert_close(actor(batch()).logprobs.detach(), before, rtol=0, atol=0)
    actor(batch()).logprobs.sum().backward()
    assert all((p.grad is not None) == p.requires_grad for p in actor.network.parameters())
    assert sum(p.requires_grad for p in actor.network.parameters()) == 28


def test_the_working_copy_follows_the_adapters() -> None:
    actor = Actor(adapted())
    actor.enable_bf16_working_copy()
    optimizer = torch.optim.AdamW([p for p in actor.parameters() if p.requires_grad], lr=0.05, fused=True)
    before = actor(batch()).logprobs

    before.sum().backward()
    optimizer.step()

    fresh = Actor(copy.deepcopy(actor.network))
    fresh.enable_bf16_working_copy()
    torch.testing.assert_close(actor(batch()).logprobs, fresh(batch()).logprobs, rtol=0, atol=0)
    assert not torch.allclose(actor(batch()).logprobs, before, atol=1e-2)


def test_layers_are_chosen_by_name_and_gradient_checkpointing_changes_nothing() -> None:
    settings = LoraSettings(r=2, target_modules=["q_proj", "v_proj"])
    gradients = []
    for is_checkpointing in (False, True):
        network = adapted(settings)
        actor = Actor(network, gradient_checkpointing=is_checkpointing).train()
        actor(batch()).logprobs.sum().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters() if p.requires_grad})
    assert len(gradients[0]) == 2 * 2 * 2
    assert all(".q_proj." in name or ".v_proj." in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 0}, r"model\.lora\.r=0 must be at least 1"),
        ({"alpha": 0.0}, r"model\.lora\.alpha=0\.0 must be above 0"),
        ({"target_modules": "attention"}, r"model\.lora\.target_modules='attention' must be 'all-linear' or a list"),
        ({"target_modules": []}, r"target_modules is empty"),
        (
            {"target_modules": ["q_prj"]},
            r"target_modules=\['q_prj'\] does not fit Llama.*linear layers are down_proj",
        ),
        (
            {"target_modules": ["embed_tokens"]},
            r"takes in model\.embed_tokens, which is no linear layer of the back",
        ),
        ({"target_modules": ["lm_head"]}, r"takes in lm_head, which is no linear layer of the back"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add_lora(tiny_llama(), LoraSettings(**settings))


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModuleNotFoundError, match=r"model\.lora needs the package peft\. Fix: pip install"):
        add_lora(tiny_llama(), LoraSettings())
