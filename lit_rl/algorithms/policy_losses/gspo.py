"""GSPO: one length-normalised probability ratio per sequence, clipped as a whole."""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.checks import check_mask, check_same_shape
from lit_rl.algorithms.policy_losses.clipped import clipped_policy_loss
from lit_rl.algorithms.policy_losses.ratio import log_ratio

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper bound of the mean log-ratio, nats."""


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> Tensor:
    """Return the clipped loss with the sequence's ratio at every token (the GSPO-token form).

    ``log s_t = mean over the sequence of (logprobs - old_logprobs)`` in value, with the gradient of the token's own
    log-prob. With one advantage per sequence and ``seq-mean-token-mean`` it is the paper's sequence loss; other modes
    are honoured.

    Args:
        logprobs: ``[B, T]`` float, nats, of the policy being trained.
        old_logprobs: ``[B, T]`` float, nats; not differentiated.
        advantages: ``[B, 1]`` or ``[B, T]`` float.
        mask: ``[B, T]`` bool, True where the token counts.
        clip_ratio_low: Lower half-width around 1; far below PPO's, because the ratio is a mean.
        clip_ratio_high: Upper half-width.

    Returns:
        ``[B, T]`` loss.

    Source: arXiv:2507.18071.
    """
    check_mask(mask)
    check_same_shape(logprobs=logprobs, mask=mask)
    differences = log_ratio(logprobs.detach(), old_logprobs)
    sequence_log_ratio = masked_mean(differences, mask, dim=1).unsqueeze(1)  # [B, 1]
    # The old log-prob that makes the token's ratio equal the sequence's, with an unchanged gradient.
    anchor = logprobs.detach() - sequence_log_ratio.clamp(max=MAX_LOG_SEQUENCE_RATIO)
    return clipped_policy_loss(
        logprobs,
        anchor,
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=None,
    )
