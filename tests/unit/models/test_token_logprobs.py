import math

import pytest
import torch
from torch import Tensor

import lit_rl.models.token_logprobs as module
from lit_rl.models.token_logprobs import sum_pi_squared, token_logprobs


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = ((hidden @ weight.T).float() / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(num_tokens: int = 37, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (0.5 * torch.randn(num_tokens, 16, generator=generator)).to(dtype).requires_grad_()
    weight = (0.5 * torch.randn(101, 16, generator=generator)).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(101, (num_tokens,), generator=generator)


def test_temperature_divides_the_logits() -> None:
    # Case O27: logits [2, 0] at temperature 0.5; -0.12693 would be the unscaled value.
    value = token_logprobs(torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0]), temperature=0.5)

    assert value.item() == pytest.approx(-0.01815, abs=1e-5)


def test_entropy_of_equal_logits_is_the_log_of_their_number() -> None:
    _, entropies = token_logprobs(
        torch.zeros(3, 4), torch.randn(5, 4), torch.zeros(3, dtype=torch.int64), with_entropy=True
    )

    torch.testing.assert_close(entropies, torch.full((3,), math.log(5)))


@pytest.mark.parametrize("kept_bytes", [0, 8 * 101 * 4, 2**30], ids=["recompute", "keep one chunk", "keep all"])
@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_values_and_gradients_equal_plain_ones(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, chunk_size: int
) -> None:
    monkeypatch.setattr(module, "_KEPT_LOGITS_BYTES", kept_bytes)
    monkeypatch.setattr(module, "_CPU_BLOCK_BYTES", 3 * 101 * 4)
    hidden, weight, targets = inputs()
    upstream = torch.rand(2, 37, generator=torch.Generator().manual_seed(1))
    expected = plain(hidden, weight, targets, 0.7)
    expected_grads = torch.autograd.grad((torch.stack(expected) * upstream).sum(), (hidden, weight))

    actual = token_logprobs(hidden, weight, targets, 0.7, chunk_size, with_entropy=True)
    actual_grads = torch.autograd.grad((torch.stack(actual) * upstream).sum(), (hidden, weight))

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-5, atol=1e-5)


def test_gradient_of_logprobs_alone() -> None:
    hidden, weight, targets = inputs()
    upstream = torch.rand(37, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((plain(hidden, weight, targets)[0] * upstream).sum(), (hidden, weight))

    actual = torch.autograd.grad((token_logprobs(hidden, weight, targets) * upstream).sum(), (hidden, weight))

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_only_the_gradients_that_are_needed_are_made() -> None:
    hidden, weight, targets = inputs()
    expected = torch.autograd.grad(plain(hidden, weight, targets)[0].sum(), weight)[0]

    token_logprobs(hidden.detach(), weight, targets, chunk_size=8).sum().backward()

    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-5)
    assert hidden.grad is None


def test_a_tied_weight_gets_the_gradients_of_both_uses() -> None:
    _, weight, targets = inputs()
    ids = targets.flip(0)
    expected = torch.autograd.grad(plain(weight[ids], weight, targets)[0].sum(), weight)[0]

    actual = torch.autograd.grad(token_logprobs(weight[ids], weight, targets, chunk_size=8).sum(), weight)[0]

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_inputs_get_float32_statistics() -> None:
    hidden, weight, targets = inputs(dtype=torch.bfloat16)
    expected = plain(hidden, weight, targets)[0]

    actual = token_logprobs(hidden, weight, targets, chunk_size=8)
    actual.sum().backward()

    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    reference = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    plain(*reference, targets)[0].sum().backward()
    for low, exact in zip((hidden, weight), reference, strict=True):
        assert low.grad is not None
        assert exact.grad is not None
        assert low.grad.dtype == torch.bfloat16
        assert (low.grad - exact.grad).norm() < 0.01 * exact.grad.norm()


def test_autocast_computes_products_in_its_dtype_and_keeps_float32_gradients() -> None:
    hidden, weight, targets = inputs()
    low = token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = token_logprobs(hidden, weight, targets)
    actual.sum().backward()

    torch.testing.assert_close(actual, low)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_no_tokens_give_nothing_but_a_zero_gradient() -> None:
    hidden, weight, targets = inputs(0)

    logprobs = token_logprobs(hidden, weight, targets)
    logprobs.sum().backward()

    assert logprobs.shape == (0,)
    assert weight.grad is not None
    assert weight.grad.count_nonzero() == 0


def test_works_without_gradient() -> None:
    hidden, weight, targets = inputs()
    with torch.inference_mode():
        actual = token_logprobs(hidden, weight, targets)

    torch.testing.assert_close(actual, plain(hidden, weight, targets)[0].detach(), rtol=1e-5, atol=1e-5)


def test_temperature_zero_is_refused() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match=r"temperature=0\.0 must be above 0"):
        token_logprobs(hidden, weight, targets, temperature=0.0)


@pytest.mark.parametrize("chunk_size", [1, 8, 64])
def test_squared_probabilities_are_summed_in_chunks(chunk_size: int) -> None:
    hidden, weight, _ = inputs()

    sums = sum_pi_squared(hidden, weight, 0.7, chunk_size)

    expected = ((hidden @ weight.T) / 0.7).softmax(-1).square().sum(-1)
    torch.testing.assert_close(sums, expected.detach())
    assert not sums.requires_grad
    uniform = sum_pi_squared(torch.zeros(3, 4), torch.randn(5, 4))
    torch.testing.assert_close(uniform, torch.full((3,), 0.2))
