import pytest
import torch
from tiny_models import tiny_llama
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM, PreTrainedModel

from lit_rl.models.actor import Actor
from lit_rl.models.packing import pack
from lit_rl.models.reference import Reference

PROMPTS = [[3, 1, 4], [3, 1, 4], [3, 1, 4], [2, 7, 1, 8], [2, 7, 1, 8], [5]]
RESPONSES = [[1, 5, 9, 2], [6], [5, 3, 5, 8, 9], [2, 8], [], [4, 5, 9]]
GROUPS = [0, 0, 0, 1, 1, 2]


def separate_logprobs(network: PreTrainedModel, temperature: float = 1.0) -> Tensor:
    """One plain forward per sequence."""
    padded = torch.zeros(len(PROMPTS), 5)
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        if response:
            logits = network(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]
            padded = padded.index_put((torch.tensor(i), torch.arange(len(response))), logprobs)
    return padded


def all_wanted() -> list[list[int]]:
    return [[1] * len(response) for response in RESPONSES]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("share_prompts", [True, False])
def test_packed_scores_and_gradients_equal_separate_forwards(share_prompts: bool, attention: str) -> None:
    network = tiny_llama(attn_implementation=attention)
    weights = torch.randn(len(PROMPTS), 5)
    expected = separate_logprobs(network, temperature=0.8)
    expected_grads = torch.autograd.grad((expected * weights).sum(), list(network.parameters()))

    packed = pack(PROMPTS, RESPONSES, all_wanted(), group_ids=GROUPS, share_prompts=share_prompts)
    actual = Actor(network)(packed, temperature=0.8).logprobs
    actual_grads = torch.autograd.grad((actual * weights).sum(), list(network.parameters()))

    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-5)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-4, atol=5e-5)


def test_tokens_that_are_not_wanted_score_zero_and_change_nothing_else() -> None:
    network = tiny_llama()
    mask = [[1, 0, 1, 0], [1], [0, 0, 1, 1, 0], [0, 0], [], [1, 1, 0]]
    padded_mask = torch.tensor([row + [0] * (5 - len(row)) for row in mask])

    actual = Actor(network)(pack(PROMPTS, RESPONSES, mask, share_prompts=True)).logprobs

    torch.testing.assert_close(actual, separate_logprobs(network) * padded_mask, rtol=0, atol=5e-5)


def test_entropies_are_those_of_the_sampled_distributions() -> None:
    network = tiny_llama()
    scores = Actor(network)(pack([[3, 1]], [[4, 1]], [[1, 1]], share_prompts=False), temperature=2.0, with_entropy=True)

    logits = network(input_ids=torch.tensor([[3, 1, 4]])).logits[0, 1:] / 2.0
    torch.testing.assert_close(scores.entropies, torch.distributions.Categorical(logits=logits).entropy()[None])


def test_an_empty_micro_batch_gives_every_parameter_a_zero_gradient() -> None:
    network = tiny_llama()

    logprobs = Actor(network)(pack([], [], [], share_prompts=True)).logprobs
    logprobs.sum().backward()

    assert logprobs.shape == (0, 0)
    for parameter in network.parameters():
        assert parameter.grad is not None
        assert parameter.grad.count_nonzero() == 0


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_dropout_is_off_in_training_mode(gradient_checkpointing: bool) -> None:
    packed = pack(PROMPTS, RESPONSES, all_wanted(), share_prompts=False)
    expected = Actor(tiny_llama())(packed).logprobs

    actor = Actor(tiny_llama(attention_dropout=0.5), gradient_checkpointing=gradient_checkpointing).train()
    actual = actor(packed).logprobs
    actual.sum().backward()

    torch.testing.assert_close(actual, expected)


def test_gradient_checkpointing_gives_equal_gradients() -> None:
    packed = pack(PROMPTS, RESPONSES, all_wanted(), share_prompts=True)
    gradients = []
    for checkpointing in (False, True):
        actor = Actor(tiny_llama(), gradient_checkpointing=checkpointing).train()
        gradients.append(torch.autograd.grad(actor(packed).logprobs.sum(), list(actor.parameters())))

    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_model_with_dropout_modules_scores_the_same_twice() -> None:
    torch.manual_seed(0)
    network = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    packed = pack(PROMPTS, RESPONSES, all_wanted(), share_prompts=True)
    actor = Actor(network).train()

    torch.testing.assert_close(actor(packed).logprobs, separate_logprobs(network.eval()), rtol=0, atol=5e-5)


def test_soft_capped_logits_are_refused() -> None:
    network = tiny_llama()
    network.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0"):
        Actor(network)


def test_a_head_that_is_not_a_plain_product_is_refused() -> None:
    class Scaled(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 3
            return output

    with pytest.raises(ValueError, match="The logits of Scaled are not hidden states times its head"):
        Actor(Scaled(tiny_llama().config))


def test_shared_prompts_need_an_attention_with_masks() -> None:
    network = tiny_llama()
    actor = Actor(network)
    network.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="share_prompts=True needs an attention that takes a mask"):
        actor(pack(PROMPTS, RESPONSES, all_wanted(), share_prompts=True))


def test_reference_scores_without_gradient_and_stays_out_of_the_state() -> None:
    network = tiny_llama()
    packed = pack(PROMPTS, RESPONSES, all_wanted(), share_prompts=True)
    expected = Actor(network)(packed).logprobs.detach()
    owner = torch.nn.Module()
    owner.reference = Reference(network)

    actual = owner.reference.score(packed)

    torch.testing.assert_close(actual, expected)
    assert not actual.requires_grad
    assert not any(p.requires_grad for p in network.parameters())
    assert list(owner.state_dict()) == []


def test_reference_in_bfloat16_keeps_ties_and_rotary_frequencies() -> None:
    network = tiny_llama()
    frequencies = network.model.rotary_emb.inv_freq.clone()
    reference = Reference(network, dtype=torch.bfloat16)

    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert network.lm_head.weight is network.model.embed_tokens.weight
    torch.testing.assert_close(network.model.rotary_emb.inv_freq, frequencies)
    scores = reference.score(pack(PROMPTS, RESPONSES, all_wanted(), share_prompts=True))
    assert scores.dtype == torch.float32
