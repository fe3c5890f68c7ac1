"""Reduce per-token losses to one scalar, exactly, however the mini-batch is split into micro-batches and over ranks.

Every mode is a weighted sum of token losses whose weights come from counts of the whole mini-batch over all ranks.
Adding up the results of all micro-batches and ranks therefore gives the mini-batch's value; where the strategy
averages gradients over ranks, the caller multiplies by the data-parallel size. Nothing is ever divided by a number of
micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_mask, check_same_shape
from lit_rl.algorithms.groups import Groups

AGGREGATION_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "seq-mean-token-mean",
    "prompt-mean",
)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of the values where the mask is True; 0 where it is True nowhere.

    Args:
        values: Any shape, float. What stands at masked positions is never read into the result.
        mask: Same shape, bool.
        dim: Dimension to average over; ``None`` averages over all.
    """
    check_mask(mask)
    check_same_shape(values=values, mask=mask)
    kept = torch.where(mask, values, 0.0)
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    *,
    mode: str = "token-mean",
    num_tokens: float,
    num_sequences: float,
    loss_scale: float | None = None,
    prompt_weights: Tensor | None = None,
) -> Tensor:
    """Return this micro-batch's summand of the mini-batch loss.

    With L the loss, m the mask, i sequences and t tokens, N = ``num_tokens`` and S = ``num_sequences``:

    - ``token-mean``: sum_it(L m) / N; every token weighs the same (DAPO).
    - ``token-sum``: sum_it(L m).
    - ``seq-mean-token-sum``: sum_i(sum_t(L m)) / S.
    - ``seq-mean-token-sum-norm``: the previous, divided by ``loss_scale`` (Dr.GRPO).
    - ``seq-mean-token-mean``: sum_i(sum_t(L m) / sum_t(m)) / S; every sequence weighs the same (GRPO).
    - ``prompt-mean``: sum_i(w_i sum_t(L m)) with w = ``prompt_weights``; every prompt weighs the same.

    A fully masked sequence adds 0 and must not be counted in ``num_sequences``. If the whole mini-batch has no token
    (``num_tokens=0``) the result is 0, connected to the graph.

    Args:
        loss: ``[B, T]`` float, per token.
        mask: ``[B, T]`` bool, True where the token counts.
        mode: One of the modes above.
        num_tokens: True entries of the mask in the whole mini-batch, over all ranks.
        num_sequences: Sequences with at least one such token in the whole mini-batch, over all ranks.
        loss_scale: Constant length in tokens, such as the longest response allowed; ``seq-mean-token-sum-norm`` needs
            it. There is no default: the width of the padded tensor would make the loss depend on padding.
        prompt_weights: ``[B]`` float from `prompt_mean_weights`; ``prompt-mean`` needs it.

    Returns:
        Scalar of the loss's dtype.

    Raises:
        ValueError: For an unknown mode, differing shapes, a negative count, or a missing argument of the mode.
    """
    check_mask(mask)
    check_same_shape(loss=loss, mask=mask)
    if mode not in AGGREGATION_MODES:
        raise ValueError(f"mode={mode!r} is unknown. Choose one of {', '.join(AGGREGATION_MODES)}.")
    kept = torch.where(mask, loss, 0.0)
    if mode == "token-sum":
        return kept.sum()
    if mode == "token-mean":
        return _divide(kept.sum(), num_tokens, "num_tokens", mask)
    if mode == "prompt-mean":
        return (kept.sum(1) * _checked_prompt_weights(prompt_weights, loss)).sum()
    if mode == "seq-mean-token-mean":
        per_sequence = kept.sum(1) / mask.sum(1).clamp(min=1)  # [B]
        return _divide(per_sequence.sum(), num_sequences, "num_sequences", mask)
    total = _divide(kept.sum(), num_sequences, "num_sequences", mask)
    return total if mode == "seq-mean-token-sum" else total / _checked_scale(loss_scale)


def prompt_mean_weights(num_tokens: Tensor, group_ids: Tensor) -> Tensor:
    """Return the weight of each sequence's summed token losses for the mode ``prompt-mean``.

    The weight is 1 / (P n_g): n_g tokens of the sequence's group, P groups with at least one token. Sequences of a
    group without tokens get 0. Computed from the mini-batch over all ranks; each micro-batch then takes its own rows.

    Args:
        num_tokens: ``[N]`` loss tokens of each sequence of the mini-batch, over all ranks.
        group_ids: ``[N]`` int64.

    Returns:
        ``[N]`` float32.
    """
    check_same_shape(num_tokens=num_tokens, group_ids=group_ids)
    groups = Groups.from_ids(group_ids)
    group_tokens = groups.sum(num_tokens)
    num_prompts = (group_tokens > 0).sum()
    weights = torch.where(group_tokens > 0, 1.0 / (group_tokens * num_prompts), 0.0)
    return weights[groups.index].float()


def _divide(total: Tensor, count: float, name: str, mask: Tensor) -> Tensor:
    """Divide by a global count; a count of 0 is right only if nothing was summed."""
    if count < 0 or (count == 0 and bool(mask.any())):
        raise ValueError(
            f"{name}={count}, but this micro-batch alone has {int(mask.sum())} loss tokens. "
            f"Pass the count of the whole mini-batch over all ranks as {name}."
        )
    return total / count if count > 0 else total


def _checked_scale(loss_scale: float | None) -> float:
    if loss_scale is None or loss_scale <= 0:
        raise ValueError(
            f"loss_scale={loss_scale}: mode seq-mean-token-sum-norm divides by a constant length in tokens. "
            "Pass a positive number, such as the longest response allowed (data.max_response_tokens)."
        )
    return loss_scale


def _checked_prompt_weights(prompt_weights: Tensor | None, loss: Tensor) -> Tensor:
    if prompt_weights is None or tuple(prompt_weights.shape) != (loss.shape[0],):
        given = "None" if prompt_weights is None else f"of shape {tuple(prompt_weights.shape)}"
        raise ValueError(
            f"prompt_weights is {given}: mode prompt-mean needs one weight per sequence, [{loss.shape[0]}]. "
            "Compute them with prompt_mean_weights over the mini-batch and take the rows of this micro-batch."
        )
    return prompt_weights.to(loss)
