"""Losses for stale or mismatched rollouts: decoupled PPO, and REINFORCE on the rollout policy.

Decoupled, with three policies: the engine sampled (rollout), the trainer's policy at the start of the iteration
bounds the step (old), the weight between these two is a truncated constant. Bypass: the rollout log-probs stand in
for the old ones and no extra forward is needed. The clipped form of bypass is `clipped_policy_loss` with the rollout
log-probs as the old ones, without weights: the ratio contains the correction already.
"""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.importance.weights import truncated_importance_weights
from lit_rl.algorithms.policy_losses.clipped import clipped_policy_loss
from lit_rl.algorithms.policy_losses.reinforce import reinforce_loss


def decoupled_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    level: str = "token",
    cap: float = 2.0,
) -> Tensor:
    """Return ``min(pi_old / pi_rollout, cap)`` times the clipped loss around the old policy.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats, of the trainer at the start of the iteration (proximal policy).
        rollout_logprobs: ``[B, T]`` float, nats, of the engine that sampled, possibly with older weights (behaviour
            policy).
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool, True where the policy sampled the token.
        clip_ratio_low: As in `clipped_policy_loss`.
        clip_ratio_high: As in `clipped_policy_loss`.
        clip_ratio_c: As in `clipped_policy_loss`.
        level: As in `truncated_importance_weights`.
        cap: As in `truncated_importance_weights`.

    Returns:
        ``[B, T]`` loss, 0 where masked.

    Source: arXiv:2110.00641 (batch size-invariance); for language models arXiv:2505.24298.
    """
    loss = clipped_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
    return loss * truncated_importance_weights(old_logprobs, rollout_logprobs, mask, level=level, cap=cap)


def bypass_reinforce_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    cap: float = 2.0,
) -> Tensor:
    """Return ``-w A logprobs`` with w the truncated weight of the *current* policy against the engine's.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        rollout_logprobs: ``[B, T]`` float, nats, of the engine that sampled.
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool.
        level: As in `truncated_importance_weights`.
        cap: As in `truncated_importance_weights`.

    Returns:
        ``[B, T]`` loss, 0 where masked.
    """
    weights = truncated_importance_weights(logprobs, rollout_logprobs, mask, level=level, cap=cap)
    return weights * reinforce_loss(logprobs, advantages)
