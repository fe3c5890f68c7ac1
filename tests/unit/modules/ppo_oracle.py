"""A plain float64 PPO with a critic that the module's update is held against: loops, one sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from grpo_oracle import adamw, logprobs, sequence_weights
from torch import Tensor, nn

from lit_rl.types import Trajectory


class ValueModel(nn.Module):
    """A backbone with a linear head on it, in float64."""

    def __init__(self, backbone: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(head.in_features, 1, dtype=torch.float64)
        self.value_head.load_state_dict({name: t.double() for name, t in head.state_dict().items()})

    def values(self, trajectory: Trajectory) -> Tensor:
        """The value of the state before each response token."""
        ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
        hidden = self.backbone(ids).last_hidden_state[0, len(trajectory.prompt_ids) - 1 : -1]
        return self.value_head(hidden)[:, 0]


def oracle_ppo(
    actor: nn.Module,
    critic: ValueModel,
    trajectories: Sequence[Trajectory],
    mini_batches: Sequence[Sequence[int]],
    *,
    lr: float,
    critic_lr: float,
    eps: float,
    gamma: float,
    lam: float,
    value_clip: float,
    clip: float = 0.2,
    mode: str = "token-mean",
    loss_scale: float = 1.0,
    kl_coef: float = 0.0,
    reference: nn.Module | None = None,
) -> None:
    """Train actor and critic in place."""
    old = [logprobs(actor, t, 1.0).detach() for t in trajectories]
    old_values = [critic.values(t).detach() for t in trajectories]
    ref = [logprobs(reference, t, 1.0).detach() for t in trajectories] if reference is not None else old
    pairs = [
        gae_by_hand(t, values, gamma, lam, kl_coef * (one - other))
        for t, values, one, other in zip(trajectories, old_values, old, ref, strict=True)
    ]
    flat = torch.cat([a[torch.tensor(t.loss_mask) > 0] for t, (a, _) in zip(trajectories, pairs, strict=True)])
    advantages = [(a - flat.mean()) / torch.sqrt(flat.var() + 1e-8) for a, _ in pairs]
    moments = [
        {n: (torch.zeros_like(p), torch.zeros_like(p)) for n, p in m.named_parameters()} for m in (actor, critic)
    ]
    for step, indices in enumerate(mini_batches, start=1):
        actor.zero_grad()
        critic.zero_grad()
        weights = sequence_weights([trajectories[i] for i in indices], mode, loss_scale)
        for i, weight in zip(indices, weights, strict=True):
            mask = torch.tensor(trajectories[i].loss_mask, dtype=torch.float64)
            ratio = (logprobs(actor, trajectories[i], 1.0) - old[i]).exp()
            surrogate = torch.minimum(ratio * advantages[i], ratio.clamp(1 - clip, 1 + clip) * advantages[i])
            value, returns = critic.values(trajectories[i]), pairs[i][1]
            near = old_values[i] + (value - old_values[i]).clamp(-value_clip, value_clip)
            error = torch.maximum((value - returns) ** 2, (near - returns) ** 2)
            (weight * ((0.5 * error - surrogate) * mask).sum()).backward()
        adamw(actor, moments[0], step, lr, eps, 1.0)
        adamw(critic, moments[1], step, critic_lr, eps, 1.0)


def gae_by_hand(
    trajectory: Trajectory, values: Tensor, gamma: float, lam: float, penalties: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of one trajectory, from its last sampled token to its first."""
    advantages = torch.zeros(len(trajectory.loss_mask), dtype=torch.float64)
    upcoming_value, upcoming_advantage, reward = 0.0, 0.0, float(trajectory.reward or 0.0)
    for column in reversed(range(len(trajectory.loss_mask))):
        if not trajectory.loss_mask[column]:
            continue
        delta = reward - penalties[column] + gamma * upcoming_value - values[column]
        upcoming_advantage = delta + gamma * lam * upcoming_advantage
        upcoming_value, reward = values[column], 0.0
        advantages[column] = upcoming_advantage
    return advantages, advantages + values
