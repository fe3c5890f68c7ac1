"""Distillation losses: pull the policy towards a teacher on the policy's own samples.

Forward KL works on the teacher's top-k tokens and needs the student's log-probs of those; reverse KL needs only the
log-prob of the sampled token from both. Rows and positions are those of the loss mask; nothing is masked or
aggregated here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_same_shape
from lit_rl.algorithms.kl import kl_penalty

TAILS = ("ignore", "renormalize", "bucket")


def forward_kl_topk(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    *,
    tail: str = "ignore",
    min_logprob: float | None = None,
    max_loss: float | None = None,
) -> Tensor:
    """Return ``sum over the teacher's top k of p_T (log p_T - log p_S)`` per token, not below 0.

    Args:
        logprobs: ``[B, T, K]`` float, nats: the student's log-probs of the teacher's top-k tokens, same order.
        teacher_logprobs: ``[B, T, K]`` float, nats, <= 0; not differentiated.
        tail: What becomes of the probability outside the top k. ``ignore``: left out (biased). ``renormalize``: both
            distributions are scaled to 1 over the k tokens. ``bucket``: one more outcome "any other token"; a lower
            bound of the full divergence.
        min_logprob: Smaller log-probs, of both, are raised to this; ``None`` is off.
        max_loss: Larger token losses are cut to this, nats; ``None`` is off.

    Returns:
        ``[B, T]`` nats.
    """
    check_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    if tail not in TAILS:
        raise ValueError(f"tail={tail!r} is unknown. Choose one of {', '.join(TAILS)}.")
    student, teacher = logprobs, teacher_logprobs.detach()
    if tail == "bucket":
        student = torch.cat((student, _log_of_rest(student)), dim=-1)  # [B, T, K + 1]
        teacher = torch.cat((teacher, _log_of_rest(teacher)), dim=-1)
    elif tail == "renormalize":
        student, teacher = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    if min_logprob is not None:
        student, teacher = student.clamp(min=min_logprob), teacher.clamp(min=min_logprob)
    loss = (teacher.exp() * (teacher - student)).sum(-1).clamp(min=0.0)
    return loss if max_loss is None else loss.clamp(max=max_loss)


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """Return an estimate of KL(student || teacher) at every sampled token, as a loss.

    Args:
        logprobs: ``[B, T]`` float, nats, of the student at the sampled tokens.
        teacher_logprobs: ``[B, T]`` float, nats, of the teacher at the same tokens; not differentiated.
        kind: See `lit_rl.algorithms.kl.kl_penalty`.

    Returns:
        ``[B, T]`` nats.

    Raises:
        ValueError: For plain ``k1``: the teacher drops out of its gradient. Use ``k1+``, or `distillation_advantages`.
    """
    if kind in ("k1", "kl"):
        raise ValueError(
            f"kind={kind!r}: as a loss its gradient does not contain the teacher. "
            "Use 'k1+' or 'k3', or turn it into an advantage with distillation_advantages."
        )
    return kl_penalty(logprobs, teacher_logprobs, kind)


@torch.no_grad()
def distillation_advantages(old_logprobs: Tensor, teacher_logprobs: Tensor, *, max_abs: float | None = None) -> Tensor:
    """Return ``log p_T - log p_S`` of the sampled tokens as advantages: the policy-gradient form of reverse KL.

    Args:
        old_logprobs: ``[B, T]`` float, nats, of the policy that sampled.
        teacher_logprobs: ``[B, T]`` float, nats.
        max_abs: Bound on the size, nats; ``None`` is off.

    Returns:
        ``[B, T]`` nats, detached; add them to the task's advantages or use them alone.
    """
    gap = -kl_penalty(old_logprobs, teacher_logprobs, "k1")
    return gap if max_abs is None else gap.clamp(-max_abs, max_abs)


@torch.no_grad()
def topk_mass(logprobs: Tensor) -> Tensor:
    """Return the probability that ``[B, T, K]`` log-probs cover, ``[B, T]``: how much a truncated loss sees."""
    return logprobs.exp().sum(-1)


def _log_of_rest(logprobs: Tensor) -> Tensor:
    """Return ``[B, T, 1]`` log of the probability not covered, which is taken to be at least 1e-7."""
    covered = logprobs.exp().sum(-1, keepdim=True).clamp(max=1.0 - 1e-7)
    return torch.log1p(-covered)
