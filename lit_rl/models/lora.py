"""Low-rank adapters on a network: added with `peft`, switched off for the reference, merged for whoever reads weights.

Position in the flow: loading -> **adapters** -> actor. The network stays the transformers model it was: its linear
layers are replaced in place, so packed attention, the bfloat16 working copy and gradient checkpointing go on as they
are. Engines and exported folders get merged weights under Hugging Face names; checkpoints hold the adapters alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"
_BASE = ".base_layer"
_A, _B = "lora_A", "lora_B"


@dataclass(kw_only=True)
class LoraSettings:
    """Low-rank adaptation: ``W + alpha / r * B A`` with A and B trained and W frozen (arXiv:2106.09685).

    Without dropout: old, new and reference log-probs must come from the same function.

    Attributes:
        r: Rank of A and B, at least 1.
        alpha: Scale of the update, times r; above 0.
        target_modules: Names of the layers that get adapters (such as ``[q_proj, v_proj]``), or ``all-linear``: all
            but the head.
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        """Refuse what cannot work before anything is loaded."""
        if self.r < 1:
            raise ValueError(f"model.lora.r={self.r} must be at least 1.")
        if not self.alpha > 0:
            raise ValueError(f"model.lora.alpha={self.alpha} must be above 0.")
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            raise ValueError(
                f"model.lora.target_modules={self.target_modules!r} must be 'all-linear' or a list of layer names."
            )
        if not self.target_modules:
            raise ValueError("model.lora.target_modules is empty: no layer would be trained.")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints."""
        return asdict(self)


def add_lora(network: PreTrainedModel, settings: LoraSettings) -> None:
    """Put adapters on a network, in place, and freeze everything else. They begin as the identity.

    Args:
        network: A transformers causal language model.
        settings: Which layers, and how large.

    Raises:
        ModuleNotFoundError: If peft is not installed.
        ValueError: If no layer is called so, or one is not linear.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("model.lora needs the package peft. Fix: pip install 'lit_rl[lora]'.") from error

    linear = {name for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    names = sorted({name.rpartition(".")[2] for name in linear})
    config = LoraConfig(r=settings.r, lora_alpha=settings.alpha, target_modules=settings.target_modules)  # type: ignore[arg-type]
    try:
        inject_adapter_in_model(config, network, adapter_name=_ADAPTER)
    except ValueError as error:
        raise ValueError(
            f"model.lora.target_modules={settings.target_modules} does not fit {type(network).__name__}: {error} Its "
            f"linear layers are {', '.join(names)}."
        ) from error
    head = network.get_output_embeddings()
    for name, module in network.named_modules():
        if isinstance(module, LoraLayer) and (not isinstance(module, Linear) or module is head):
            raise ValueError(
                f"model.lora.target_modules={settings.target_modules} takes in {name}, which is no linear layer of the "
                f"backbone. Name some of {', '.join(names)}."
            )


@contextlib.contextmanager
def without_adapters(network: nn.Module) -> Iterator[None]:
    """Context in which a network computes as if it had no adapters."""
    layers: list[Any] = [module for module in network.modules() if hasattr(module, _A)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


@dataclass(frozen=True)
class WeightPart:
    """A weight as engines know it, and what it is made of.

    Attributes:
        name: Hugging Face name.
        weight: The frozen or trained parameter.
        down: A of its adapter, ``[r, in]``; ``None`` without one.
        up: B of its adapter, ``[out, r]``.
        scale: Of their product.
    """

    name: str
    weight: nn.Parameter
    down: nn.Parameter | None = None
    up: nn.Parameter | None = None
    scale: float = 1.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters it is made of."""
        return [part for part in (self.weight, self.down, self.up) if part is not None]

    def merged(self, full: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Tensor:
        """The weight with its adapter, detached; the parameter's own storage where there is none.

        Args:
            full: Makes a whole tensor of a sharded one.
        """
        weight = full(self.weight.detach())
        if self.down is None or self.up is None:
            return weight
        return weight + self.scale * (full(self.up.detach()) @ full(self.down.detach())).to(weight.dtype)


def weight_parts(network: nn.Module) -> Iterator[WeightPart]:
    """Yield every weight of a network under its Hugging Face name, in order; tied ones once, under their first name."""
    layers: dict[str, Any] = {name: module for name, module in network.named_modules() if hasattr(module, _A)}
    for name, parameter in network.named_parameters():
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner.removesuffix(_BASE)) if owner.endswith(_BASE) else None
        if layer is None:
            if not _is_adapter(owner, layers):
                yield WeightPart(name, parameter)
        elif leaf != "weight":
            yield WeightPart(f"{owner.removesuffix(_BASE)}.{leaf}", parameter)
        else:
            down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
            yield WeightPart(f"{owner.removesuffix(_BASE)}.weight", parameter, down, up, float(layer.scaling[_ADAPTER]))


@torch.no_grad()
def merge_lora(network: nn.Module) -> None:
    """Merge adapters into the weights they belong to, in place, and take them off."""
    for part in weight_parts(network):
        if part.down is not None:
            part.weight.copy_(part.merged())
    for name, module in list(network.named_modules()):
        if hasattr(module, _A):
            network.set_submodule(name, module.get_base_layer())  # type: ignore[operator]


def _is_adapter(owner: str, layers: dict[str, Any]) -> bool:
    """Whether a module's name lies in an adapter: ``...q_proj.lora_A.default``."""
    layer, _, kind = owner.rpartition(".")[0].rpartition(".")
    return kind in (_A, _B) and layer in layers
