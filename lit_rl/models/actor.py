"""The policy network as the algorithms see it: packed tokens in, ``[B, T]`` log-probs out.

Position in the flow: packed micro-batch -> **Actor** -> per-token log-probs and entropies -> policy loss.
Runs the backbone of a causal language model without cache and dropout, and its head only on the tokens that are wanted.
Sampling, losses and optimizers are elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.models.packing import PackedSequences, unpack
from lit_rl.models.token_logprobs import token_logprobs
from lit_rl.models.working_copy import Bf16WorkingCopy


@dataclass(kw_only=True)
class TokenScores:
    """What a network says about the response tokens of a micro-batch.

    Attributes:
        logprobs: ``[B, T]`` float32, nats; 0 where a token was not wanted.
        entropies: ``[B, T]`` float32, nats, of the distributions the tokens came from; ``None`` unless asked for.
    """

    logprobs: Tensor
    entropies: Tensor | None


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
        _check_head(network)
        _switch_off_dropout(network)
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

    def forward(self, packed: PackedSequences, temperature: float = 1.0, with_entropy: bool = False) -> TokenScores:
        """Score the wanted tokens of a packed micro-batch.

        Args:
            packed: The micro-batch, on the network's device.
            temperature: The one the tokens were sampled with, above 0.
            with_entropy: Also return entropies.

        Returns:
            Scores of shape ``[B, T]``; they depend on every parameter even when no token is wanted.
        """
        network = self.network
        if self.working_copy is not None:
            network = self.working_copy.network  # type: ignore[assignment]
            network.train(self.network.training)
        return score_packed(network, packed, temperature, with_entropy, self.chunk_size)


def score_packed(
    network: PreTrainedModel, packed: PackedSequences, temperature: float, with_entropy: bool, chunk_size: int = 1024
) -> TokenScores:
    """Run ``network`` on a packed row and score its wanted tokens; see `Actor.forward`.

    Raises:
        ValueError: If the row shares prompts and the network's attention cannot take a mask, or would not apply its
            sliding window to it.
    """
    mask = None
    if packed.attention_mask is not None:
        _check_mask_is_honoured(network, packed)
        mask = _additive_mask(packed.attention_mask, network)
    output = network.base_model(
        input_ids=packed.input_ids, position_ids=packed.position_ids, attention_mask=mask, use_cache=False
    )
    hidden = output.last_hidden_state[0].index_select(0, packed.source_index)  # [S, D]
    weight = network.get_output_embeddings().weight
    scores = token_logprobs(hidden, weight, packed.target_ids, temperature, chunk_size, with_entropy)
    if isinstance(scores, tuple):
        return TokenScores(logprobs=unpack(scores[0], packed), entropies=unpack(scores[1], packed))
    return TokenScores(logprobs=unpack(scores, packed), entropies=None)


def _additive_mask(mask: Tensor, network: PreTrainedModel) -> Tensor:
    """Turn True into 0 and False into the most negative number, in the dtype attention computes in."""
    device_type = mask.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else network.dtype
    # Made once here: given a boolean mask, the kernel would convert it in every layer.
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _check_mask_is_honoured(network: PreTrainedModel, packed: PackedSequences) -> None:
    attention = network.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"share_prompts=True needs an attention that takes a mask (sdpa or eager), the model uses {attention!r}. "
            "Load it with attn_implementation='sdpa', or set share_prompts=False."
        )
    window = getattr(network.config.get_text_config(), "sliding_window", None)
    longest = int(packed.position_ids.max()) + 1
    if window is not None and longest > window:
        # transformers takes a 4-D mask as it is for every layer (5.19), also for those with a window.
        raise ValueError(
            f"share_prompts=True cannot be combined with sliding-window attention: a sequence has {longest} tokens, "
            f"the window {window}. Set share_prompts=False."
        )


def _switch_off_dropout(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _check_head(network: PreTrainedModel) -> None:
    """Refuse heads that do more than a matrix product, by what the configuration says and by trying it."""
    name = type(network).__name__
    config = network.config.get_text_config()
    for option, neutral in {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}.items():
        if getattr(config, option, neutral) not in (None, neutral):
            raise ValueError(
                f"{name} changes its logits with {option}={getattr(config, option)}, which lit_rl does not reproduce: "
                f"log-probs would be wrong. Choose another model, or set {option} to {neutral} in its configuration."
            )
    head = network.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(f"{name} has no plain linear head without bias ({head}); lit_rl cannot compute its log-probs.")
    if head.weight.is_meta:
        return
    was_training = network.training
    network.eval()
    with torch.no_grad():
        ids = torch.arange(2, device=head.weight.device)[None]
        expected = network(input_ids=ids, use_cache=False).logits
        actual = head(network.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    network.train(was_training)
    if not torch.allclose(actual, expected, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"The logits of {name} are not hidden states times its head; lit_rl cannot compute its log-probs."
        )
