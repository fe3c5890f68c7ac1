"""Rollout corrections as settings, with named ones to choose from, and the function that applies them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from lit_rl.algorithms.importance.rejection import rejection_mask
from lit_rl.algorithms.importance.weights import (
    masked_importance_weights,
    normalize_weights,
    truncated_importance_weights,
)


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """One rejection rule; see `rejection_mask` for the fields."""

    kind: str
    high: float
    low: float | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """How the gap between trainer and rollout engine is corrected.

    Attributes:
        level: ``token``, ``sequence`` or ``geometric`` weights; ``None`` uses no weights.
        cap: Largest weight (truncated importance sampling).
        band: Lowest and highest weight kept, others become 0 (IcePop); replaces ``cap``. ``None`` is off.
        normalize: Whether weights are divided by their mean.
        rejections: Rules that narrow the loss mask; a token is kept if all keep it.
        bypass: Whether the rollout log-probs stand in for the old ones, which saves a forward. Read by the module.
    """

    level: str | None = None
    cap: float = 2.0
    band: tuple[float, float] | None = None
    normalize: bool = False
    rejections: tuple[Rejection, ...] = ()
    bypass: bool = False


_GEOMETRIC = Rejection(kind="seq_mean_k1", low=0.999, high=1.001)
_K3 = Rejection(kind="seq_mean_k3", high=0.01)

PRESETS: dict[str, RolloutCorrection] = {
    "off": RolloutCorrection(),
    "token-tis": RolloutCorrection(level="token"),
    "seq-tis": RolloutCorrection(level="sequence"),
    "token-tis-normalized": RolloutCorrection(level="token", normalize=True),
    "icepop": RolloutCorrection(level="token", band=(0.5, 5.0)),
    "geo-rejection": RolloutCorrection(rejections=(_GEOMETRIC,)),
    "geo-rejection-token-tis": RolloutCorrection(level="token", rejections=(_GEOMETRIC,)),
    "geo-rejection-seq-tis": RolloutCorrection(level="sequence", rejections=(_GEOMETRIC,)),
    "k3-rejection": RolloutCorrection(rejections=(_K3,)),
    "k3-rejection-token-tis": RolloutCorrection(level="token", rejections=(_K3,)),
    "bypass": RolloutCorrection(bypass=True),
    "bypass-geo-rejection": RolloutCorrection(bypass=True, rejections=(_GEOMETRIC,)),
    "bypass-token-tis": RolloutCorrection(bypass=True, level="token"),
}


def rollout_correction(name: str, **changes: object) -> RolloutCorrection:
    """Return the preset of that name, with fields of `RolloutCorrection` replaced by keyword.

    Raises:
        ValueError: If the name is unknown; the message lists the presets.
    """
    if name not in PRESETS:
        raise ValueError(f"Rollout correction {name!r} is unknown. Choose one of {', '.join(PRESETS)}.")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]


def correct_rollout(
    logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, correction: RolloutCorrection
) -> tuple[Tensor | None, Tensor]:
    """Return the weights that multiply the token losses, and the narrowed loss mask.

    Args:
        logprobs: ``[B, T]`` float, nats, of the trainer: the old ones, or the current ones with ``bypass``.
        rollout_logprobs: ``[B, T]`` float, nats, of the engine.
        mask: ``[B, T]`` bool.
        correction: What to do.

    Returns:
        ``weights``: ``[B, T]`` detached, 0 outside the kept mask, or ``None`` without weights. ``kept``: ``[B, T]``
        bool. The mean for ``normalize`` is taken over the tokens given; over ranks, call `normalize_weights` with the
        reduced mean instead.
    """
    kept = mask
    for rule in correction.rejections:
        kept = kept & rejection_mask(logprobs, rollout_logprobs, mask, kind=rule.kind, low=rule.low, high=rule.high)
    if correction.level is None:
        return None, kept
    if correction.band is None:
        weights = truncated_importance_weights(
            logprobs, rollout_logprobs, mask, level=correction.level, cap=correction.cap
        )
    else:
        low, high = correction.band
        weights = masked_importance_weights(
            logprobs, rollout_logprobs, mask, level=correction.level, low=low, high=high
        )
    weights = weights * kept
    return (normalize_weights(weights, kept) if correction.normalize else weights), kept
