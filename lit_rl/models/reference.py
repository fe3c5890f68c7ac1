"""A frozen network that scores what the policy sampled: the anchor of a KL term, or a teacher.

Position in the flow: scoring before the first update of an iteration, or inside the update, when a KL term needs it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.models.actor import Actor, score_packed
from lit_rl.models.backbone import prepare_network
from lit_rl.models.lora import without_adapters
from lit_rl.models.packing import PackedSequences


class FrozenPolicy(Protocol):
    """What scores as the anchor: a network of its own, or the actor without its adapters."""

    def to(self, device: torch.device | str) -> FrozenPolicy:
        """Move to ``device``, in place."""
        ...

    def score(self, packed: PackedSequences, temperature: float = 1.0) -> Tensor:
        """Return log-probs of the wanted tokens, ``[B, T]`` float32 in nats, 0 elsewhere, without gradient."""
        ...


class AdapterFreeActor:
    """The policy before training, where only adapters are trained: the actor with them switched off. Costs no memory.

    Args:
        actor: Its network has adapters.
    """

    def __init__(self, actor: Actor) -> None:
        self.actor = actor

    def to(self, device: torch.device | str) -> AdapterFreeActor:
        """Nothing: it moves with the actor."""
        return self

    @torch.no_grad()
    def score(self, packed: PackedSequences, temperature: float = 1.0) -> Tensor:
        """Return log-probs of the wanted tokens, ``[B, T]`` float32 in nats, 0 elsewhere, without gradient."""
        network = self.actor.network if self.actor.working_copy is None else self.actor.working_copy.network
        with without_adapters(network):
            return self.actor(packed, temperature).logprobs


class Reference:
    """Holds a frozen network.

    Not a module: assigned to a LightningModule it is not registered, so it is in no checkpoint, no optimizer and no
    gradient synchronisation. Move it by hand.

    Args:
        network: A causal language model; its parameters are frozen in place.
        dtype: Cast it; ``torch.bfloat16`` where the actor computes in bfloat16. ``None`` leaves it.
        chunk_size: Tokens whose logits exist at once.
    """

    def __init__(self, network: PreTrainedModel, *, dtype: torch.dtype | None = None, chunk_size: int = 1024) -> None:
        self.network = network.requires_grad_(False).eval()
        prepare_network(network)
        self.scorer = Scorer(network, chunk_size)
        if dtype is not None:
            # Not network.to(dtype): that would round the rotary frequencies, which are a float32 buffer.
            for parameter in network.parameters():
                parameter.data = parameter.data.to(dtype)

    def to(self, device: torch.device | str) -> Reference:
        """Move the network to ``device``, in place."""
        self.network.to(device)
        return self

    @torch.no_grad()
    def score(self, packed: PackedSequences, temperature: float = 1.0) -> Tensor:
        """Return log-probs of the wanted tokens, ``[B, T]`` float32 in nats, 0 elsewhere, without gradient."""
        logprobs: Tensor = self.scorer(packed, temperature)
        return logprobs


class Scorer(nn.Module):
    """A network's log-probs as a forward pass, which is where strategies gather sharded weights.

    Args:
        network: A causal language model.
        chunk_size: Tokens whose logits exist at once.
    """

    def __init__(self, network: PreTrainedModel, chunk_size: int) -> None:
        super().__init__()
        self.network = network
        self.chunk_size = chunk_size

    def forward(self, packed: PackedSequences, temperature: float) -> Tensor:
        """Return log-probs of the wanted tokens, ``[B, T]`` float32 in nats, 0 elsewhere."""
        return score_packed(self.network, packed, temperature, with_entropy=False, chunk_size=self.chunk_size).logprobs
