"""The policy network as the algorithms see it: packed tokens in, ``[B, T]`` log-probs out.

Position in the flow: packed micro-batch -> **Actor** -> per-token log-probs and entropies -> policy loss.
Runs the backbone of a causal language model without cache and dropout, and its head only on the tokens that are wanted.
Sampling, losses and optimizers are elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.models.backbone import check_head, packed_hidden_states, prepare_network
from lit_rl.models.packing import PackedSequences, unpack
from lit_rl.models.token_logprobs import most_likely_tokens, sum_pi_squared, token_logprobs
from lit_rl.models.working_copy import Bf16WorkingCopy


class TokenScores(NamedTuple):
    """What a network says about the response tokens of a micro-batch.

    A tuple, because that is where sharding strategies look for the tensors whose gradient comes back.

    Attributes:
        logprobs: ``[B, T]`` float32, nats; 0 where a token was not wanted.
        entropies: ``[B, T]`` float32, nats, of the distributions the tokens came from; ``None`` unless asked for.
        is_most_likely: ``[B, T]`` float32, 1 where the token is the network's first choice; ``None`` unless asked for.
        sum_pi_squared: ``[B, T]`` float32, their sums of squared probabilities, without gradient; ``None`` unless
            asked for.
    """

    logprobs: Tensor
    entropies: Tensor | None = None
    is_most_likely: Tensor | None = None
    sum_pi_squared: Tensor | None = None


class Actor(nn.Module):
    """A causal language model that scores packed sequences.

    Args:
        network: A transformers causal language model, parameters in float32 where it is trained. Its dropout is
            switched off for good: old, new and reference log-probs must come from the same function.
        gradient_checkpointing: Recompute each layer's activations in the backward pass instead of keeping them.
        chunk_size: Tokens whose logits exist at once.

    Raises:
        ValueError: If the network's logits are more than hidden states times a matrix.
    """

    def __init__(
        self, network: PreTrainedModel, *, gradient_checkpointing: bool = False, chunk_size: int = 1024
    ) -> None:
        super().__init__()
        check_head(network)
        prepare_network(network)
        if gradient_checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.network = network
        self.chunk_size = chunk_size
        self.gradient_checkpointing = gradient_checkpointing
        self.working_copy: Bf16WorkingCopy | None = None
        self.train(self.training)

    def train(self, mode: bool = True) -> Actor:
        """Set the mode of this module; the network itself stays in evaluation mode."""
        super().train(mode)
        # transformers checkpoints activations in training mode only; its dropouts are all zero.
        self.network.train(mode and self.gradient_checkpointing)
        return self

    def enable_bf16_working_copy(self) -> None:
        """Compute in bfloat16 on a copy that follows the float32 parameters (one process, CPU)."""
        self.working_copy = Bf16WorkingCopy(self.network)

    def forward(
        self,
        packed: PackedSequences,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_most_likely: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> TokenScores:
        """Score the wanted tokens of a packed micro-batch.

        Args:
            packed: The micro-batch, on the network's device.
            temperature: The one the tokens were sampled with, above 0.
            with_entropy: Also return entropies.
            with_most_likely: Also say which tokens are the network's first choice (computes the logits once more).
            with_sum_pi_squared: Also return sums of squared probabilities.

        Returns:
            Scores of shape ``[B, T]``; they depend on every parameter even when no token is wanted.
        """
        network = self.network
        if self.working_copy is not None:
            network = self.working_copy.network  # type: ignore[assignment]
            network.train(self.network.training)
        return score_packed(
            network,
            packed,
            temperature,
            with_entropy,
            self.chunk_size,
            with_most_likely=with_most_likely,
            with_sum_pi_squared=with_sum_pi_squared,
        )


def score_packed(
    network: PreTrainedModel,
    packed: PackedSequences,
    temperature: float,
    with_entropy: bool,
    chunk_size: int = 1024,
    with_most_likely: bool = False,
    with_sum_pi_squared: bool = False,
) -> TokenScores:
    """Run ``network`` on a packed row and score its wanted tokens; see `Actor.forward`."""
    hidden = packed_hidden_states(network, packed)  # [S, D]
    weight = network.get_output_embeddings().weight
    scores = token_logprobs(hidden, weight, packed.target_ids, temperature, chunk_size, with_entropy)
    logprobs, entropies = scores if isinstance(scores, tuple) else (scores, None)
    is_most_likely = None
    if with_most_likely:
        first_choice = most_likely_tokens(hidden.detach(), weight.detach(), chunk_size)
        is_most_likely = unpack((first_choice == packed.target_ids).float(), packed)
    squares = sum_pi_squared(hidden, weight, temperature, chunk_size) if with_sum_pi_squared else None
    return TokenScores(
        logprobs=unpack(logprobs, packed),
        entropies=None if entropies is None else unpack(entropies, packed),
        is_most_likely=is_most_likely,
        sum_pi_squared=None if squares is None else unpack(squares, packed),
    )
