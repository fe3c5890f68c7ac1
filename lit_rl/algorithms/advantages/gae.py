"""Generalized advantage estimation for PPO with a critic, on tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.advantages.scan import backward_scan, time_major
from lit_rl.algorithms.checks import check_in_range, check_mask, check_same_shape


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates and the returns the critic is fitted to.

    ``delta_t = r_t + gamma V_next - V_t`` and ``A_t = delta_t + gamma lam A_next``, where *next* is the next token
    the policy sampled: tool and padding tokens are passed over without discount. Rewards at masked positions are
    ignored: put the reward of a tool's answer on the policy token before it (see `rewards_at_last_token`,
    `spread_turns`).

    Args:
        rewards: ``[B, T]`` float, reward units; usually zero except at the last sampled token.
        values: ``[B, T]`` float, the critic's output in reward units, from before the update.
        mask: ``[B, T]`` bool, True where the policy sampled the token.
        gamma: Discount per sampled token, in [0, 1].
        lam: Bias-variance trade-off, in [0, 1]; 1 gives Monte-Carlo returns minus values. ``[B]`` float is one per
            row (see `length_adaptive_lambda`).

    Returns:
        ``advantages`` and ``returns`` (advantages plus values), each ``[B, T]`` of the values' dtype, exactly 0 where
        masked. Not whitened: see `whiten`.

    Raises:
        ValueError: If the tensors differ in shape, the mask is not bool, or ``gamma`` or ``lam`` is out of range.

    Source: arXiv:1506.02438, eq. 16; passing over masked tokens is ours.
    """
    check_mask(mask)
    check_same_shape(rewards=rewards, values=values, mask=mask)
    check_in_range("gamma", gamma, 0.0, 1.0)
    for bound in (lam,) if isinstance(lam, float | int) else (float(lam.min()), float(lam.max())) if len(lam) else ():
        check_in_range("lam", bound, 0.0, 1.0)
    is_sampled = time_major(mask)  # [T, B]
    kept = is_sampled.to(values.dtype)
    skipped = 1.0 - kept
    # torch.where, not a product: a NaN at a masked position must not get through.
    own_values = torch.where(is_sampled, time_major(values), 0.0)
    upcoming = backward_scan(own_values, skipped)  # value of this or the next sampled token
    deltas = time_major(rewards).to(values.dtype) - own_values
    deltas[:-1].add_(upcoming[1:], alpha=gamma)
    deltas = torch.where(is_sampled, deltas, 0.0)
    # 1 at skipped tokens, gamma lam at sampled ones; one number per row is one per column here.
    decays = skipped.addcmul_(kept, torch.as_tensor(gamma * lam, dtype=kept.dtype, device=kept.device))
    advantages = backward_scan(deltas, decays).mul_(kept)
    return advantages.t().contiguous(), (advantages + own_values).t().contiguous()


def length_adaptive_lambda(num_tokens: Tensor, *, alpha: float = 0.05) -> Tensor:
    """Return ``1 - 1 / (alpha l)`` per row, not below 0: the longer the answer, the further credit reaches back.

    The weights of the temporal differences then sum to about ``alpha l``, a fixed share of the answer.

    Args:
        num_tokens: ``[B]`` sampled tokens of each row; rows without any get 0.
        alpha: Above 0.

    Returns:
        ``[B]`` float32 in [0, 1).

    Source: arXiv:2504.05118 (VAPO).
    """
    if alpha <= 0:
        raise ValueError(f"alpha={alpha} must be above 0. The paper uses 0.05.")
    return (1.0 - 1.0 / (alpha * num_tokens.float())).clamp(min=0.0)
