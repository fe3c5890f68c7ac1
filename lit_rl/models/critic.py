"""The value network: packed tokens in, ``[B, T]`` values out.

Position in the flow: packed micro-batch -> **Critic** -> values -> GAE, and the value loss.
A backbone of its own and a linear head on the hidden state that the actor would predict each wanted token from: the
value of a token is that of the state before it. Losses and optimizers are elsewhere.
"""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.models.backbone import packed_hidden_states, prepare_network
from lit_rl.models.packing import PackedSequences, unpack
from lit_rl.models.working_copy import Bf16WorkingCopy


class Critic(nn.Module):
    """A language model's backbone that values packed sequences.

    The head begins near zero, with the same numbers in every run: the first values are about 0.01 in size, whatever the
    width of the network, and the first advantages are those of a policy without a critic.

    Args:
        network: A transformers causal language model or bare backbone, parameters in float32. Its backbone is taken
            over, its language-model head is not; dropout is switched off.
        gradient_checkpointing: Recompute each layer's activations in the backward pass instead of keeping them.
    """

    def __init__(self, network: PreTrainedModel, *, gradient_checkpointing: bool = False) -> None:
        super().__init__()
        backbone: PreTrainedModel = network.base_model  # type: ignore[assignment]
        prepare_network(backbone)
        if gradient_checkpointing:
            backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.backbone = backbone
        width = backbone.config.get_text_config().hidden_size
        self.value_head = nn.Linear(width, 1)
        with torch.no_grad():
            start = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
            self.value_head.weight.copy_(start * (0.01 / math.sqrt(width)))
            self.value_head.bias.zero_()
        self.gradient_checkpointing = gradient_checkpointing
        self.working_copy: Bf16WorkingCopy | None = None
        self.train(self.training)

    def train(self, mode: bool = True) -> Critic:
        """Set the mode of this module; the backbone stays in evaluation mode unless it checkpoints activations."""
        super().train(mode)
        self.backbone.train(mode and self.gradient_checkpointing)
        return self

    def enable_bf16_working_copy(self) -> None:
        """Compute the backbone in bfloat16 on a copy that follows the float32 parameters (one process, CPU)."""
        self.working_copy = Bf16WorkingCopy(self.backbone)

    def forward(self, packed: PackedSequences) -> Tensor:
        """Value the wanted tokens of a packed micro-batch.

        Args:
            packed: The micro-batch, on the network's device.

        Returns:
            ``[B, T]`` float32, reward units, 0 where a token was not wanted. They depend on every parameter even when
            no token is wanted.
        """
        device_type = packed.input_ids.device.type
        backbone = self.backbone
        if self.working_copy is not None:
            backbone = self.working_copy.network  # type: ignore[assignment]
            backbone.train(self.backbone.training)
        # The copy is bfloat16 already: autocast would only look for casts to make.
        with torch.autocast(device_type, enabled=False) if self.working_copy is not None else nullcontext():
            hidden = packed_hidden_states(backbone, packed)  # [S, D]
        # One number per token: bfloat16 would round it to three digits and save nothing. DeepSpeed leaves no choice.
        with torch.autocast(device_type, enabled=False):
            values = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0]  # [S]
        return unpack(values.float(), packed)
