"""Run the backbone of a causal language model on a packed row.

Position in the flow: packed micro-batch -> **backbone** -> hidden states -> LM head (actor, reference) or value head.
What a network must be for that is checked and set here: no dropout, attention that respects the packing, a plain head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_rl.models.packed_attention import PACKED_ATTENTION, use_packed_attention
from lit_rl.models.packing import PackedSequences


def prepare_network(network: PreTrainedModel) -> None:
    """Switch a network's dropout off and its attention to the packed one, in place."""
    _switch_dropout_off(network)
    use_packed_attention(network)


def packed_hidden_states(network: PreTrainedModel, packed: PackedSequences) -> Tensor:
    """Return the hidden states that predict the wanted tokens of a row, ``[S, D]``.

    Raises:
        ValueError: If the row shares prompts and the network's attention cannot take a mask, or has a window shorter
            than a sequence.
    """
    output = network.base_model(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        use_cache=False,
        **_attention_arguments(network, packed),
    )
    return output.last_hidden_state[0].index_select(0, packed.source_index)


def check_head(network: PreTrainedModel) -> None:
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


def _attention_arguments(network: PreTrainedModel, packed: PackedSequences) -> dict[str, Any]:
    """Tell the network who sees whom: by segments, by a mask, or by nothing beside the position ids."""
    if packed.has_shared_prompts:
        _check_sharing(network, packed)
    is_on_cpu = packed.input_ids.device.type == "cpu"
    if is_on_cpu and network.config._attn_implementation == PACKED_ATTENTION and not _exceeds_window(network, packed):
        # A 4-D mask is passed on as it is (transformers 5.19): an empty one saves building one that is not read.
        return {"packed_segments": packed.segments, "attention_mask": torch.empty(1, 1, 0, 0)}
    return {"attention_mask": _additive_mask(packed, network) if packed.has_shared_prompts else None}


def _additive_mask(packed: PackedSequences, network: PreTrainedModel) -> Tensor:
    """Turn True into 0 and False into the most negative number, in the dtype attention computes in."""
    mask = packed.attention_mask
    assert mask is not None
    device_type = mask.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else network.dtype
    # Made once here: given a boolean mask, the kernel would convert it in every layer.
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _exceeds_window(network: PreTrainedModel, packed: PackedSequences) -> bool:
    window = getattr(network.config.get_text_config(), "sliding_window", None)
    return window is not None and int(packed.position_ids.max()) >= window


def _check_sharing(network: PreTrainedModel, packed: PackedSequences) -> None:
    attention = network.config._attn_implementation
    if attention not in ("eager", "sdpa", PACKED_ATTENTION):
        raise ValueError(
            f"share_prompts=True needs an attention that takes a mask (sdpa or eager), the model uses {attention!r}. "
            "Load it with attn_implementation='sdpa', or set share_prompts=False."
        )
    if _exceeds_window(network, packed):
        # transformers takes a 4-D mask as it is for every layer (5.19), also for those with a window.
        raise ValueError(
            "share_prompts=True cannot be combined with sliding-window attention: a sequence has "
            f"{int(packed.position_ids.max()) + 1} tokens, the window is "
            f"{network.config.get_text_config().sliding_window}. Set share_prompts=False."
        )


def _switch_dropout_off(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
