from __future__ import annotations

import pytest
import torch

from lit_rl.models.candidate_logprobs import candidate_logprobs


def inputs(num_positions: int = 7, num_candidates: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_positions, 5, generator=generator, requires_grad=True)
    weight = torch.randn(11, 5, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(11, (num_positions, num_candidates), generator=generator)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_values_and_gradients_are_those_of_a_plain_log_softmax(chunk_size: int, temperature: float) -> None:
    hidden, weight, ids = inputs()
    upstream = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))

    values = candidate_logprobs(hidden, weight, ids, temperature, chunk_size)
    gradients = torch.autograd.grad((values * upstream).sum(), (hidden, weight))

    plain = (hidden @ weight.T / temperature).log_softmax(-1).gather(-1, ids)
    torch.testing.assert_close(values, plain)
    torch.testing.assert_close(gradients, torch.autograd.grad((plain * upstream).sum(), (hidden, weight)))


def test_nothing_to_score_still_depends_on_every_parameter() -> None:
    hidden, weight, ids = inputs(num_positions=0)

    values = candidate_logprobs(hidden, weight, ids)
    values.sum().backward()

    assert values.shape == (0, 3)
    assert weight.grad is not None


def test_shapes_that_do_not_fit_are_named() -> None:
    hidden, weight, ids = inputs()

    with pytest.raises(ValueError, match=r"hidden \[S, D\] and candidate_ids \[S, K\], got \(7, 5\) and \(6, 3\)"):
        candidate_logprobs(hidden, weight, ids[1:])
