"""A plain float64 GRPO to hold the module's update against: one sequence at a time, own softmax and AdamW."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_rl.types import Trajectory


def oracle_weights(
    model: torch.nn.Module,
    trajectories: Sequence[Trajectory],
    mini_batches: Sequence[Sequence[int]],
    *,
    lr: float,
    eps: float,
    temperature: float,
    clip: tuple[float, float],
    kl_coef: float = 0.0,
    reference: torch.nn.Module | None = None,
    mode: str = "token-mean",
    loss_scale: float = 1.0,
    max_norm: float = 1.0,
) -> dict[str, Tensor]:
    """Train ``model`` (float64) on the mini-batches in order and return its weights."""
    advantages = group_advantages(trajectories)
    old = [logprobs(model, t, temperature).detach() for t in trajectories]
    ref = [logprobs(reference, t, temperature).detach() for t in trajectories] if reference is not None else None
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step, indices in enumerate(mini_batches, start=1):
        model.zero_grad()
        weights = sequence_weights([trajectories[i] for i in indices], mode, loss_scale)
        loss = torch.zeros((), dtype=torch.float64)
        for i, weight in zip(indices, weights, strict=True):
            mask = torch.tensor(trajectories[i].loss_mask, dtype=torch.float64)
            new = logprobs(model, trajectories[i], temperature)
            ratio = (new - old[i]).exp()
            clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
            token_loss = -torch.minimum(ratio * advantages[i], clipped * advantages[i])
            if ref is not None:
                gap = ref[i] - new
                token_loss = token_loss + kl_coef * (gap.exp() - gap - 1)
            loss = loss + weight * (token_loss * mask).sum()
        loss.backward()
        adamw(model, moments, step, lr, eps, max_norm)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def sequence_weights(trajectories: Sequence[Trajectory], mode: str, loss_scale: float = 1.0) -> list[float]:
    """What the summed token losses of each sequence of a mini-batch count for."""
    lengths = [t.num_loss_tokens for t in trajectories]
    filled = max(sum(length > 0 for length in lengths), 1)
    constant = {"token-sum": 1.0, "token-mean": 1.0 / max(sum(lengths), 1), "seq-mean-token-sum": 1.0 / filled}
    constant["seq-mean-token-sum-norm"] = 1.0 / filled / loss_scale
    if mode in constant:
        return [constant[mode]] * len(lengths)
    if mode == "seq-mean-token-mean":
        return [1.0 / filled / max(length, 1) for length in lengths]
    assert mode == "prompt-mean"
    groups = [[o.num_loss_tokens for o in trajectories if o.group_id == t.group_id] for t in trajectories]
    num_prompts = len({t.group_id for t in trajectories if t.num_loss_tokens > 0})
    return [1.0 / num_prompts / max(sum(group), 1) for group in groups]


def logprobs(model: torch.nn.Module, trajectory: Trajectory, temperature: float) -> Tensor:
    """Log-probs of the response tokens, one sequence at a time."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    logits = model(ids).logits[0, len(trajectory.prompt_ids) - 1 : -1].double() / temperature
    shifted = logits - logits.max(-1, keepdim=True).values
    table = shifted - shifted.exp().sum(-1, keepdim=True).log()
    return table[torch.arange(len(trajectory.response_ids)), torch.tensor(trajectory.response_ids, dtype=torch.long)]


def group_advantages(trajectories: Sequence[Trajectory]) -> list[float]:
    """Reward minus the group's mean over its sample standard deviation."""
    result = []
    for t in trajectories:
        rewards = torch.tensor([o.reward for o in trajectories if o.group_id == t.group_id], dtype=torch.float64)
        spread = rewards.std() if len(rewards) > 1 else torch.tensor(0.0)
        result.append(float((t.reward - rewards.mean()) / (spread + 1e-6)))
    return result


def adamw(model: torch.nn.Module, moments: dict, step: int, lr: float, eps: float, max_norm: float) -> None:
    """AdamW without decay, after clipping the global norm."""
    gradients = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    with torch.no_grad():
        for name, p in model.named_parameters():
            first, second = moments[name]
            g = gradients[name] * factor
            first.mul_(0.9).add_(g, alpha=0.1)
            second.mul_(0.999).addcmul_(g, g, value=0.001)
            p -= lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + eps)
