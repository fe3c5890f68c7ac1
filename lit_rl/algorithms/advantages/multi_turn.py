"""Per-turn credit for conversations: rewards, returns and group baselines on turns instead of tokens.

A turn is an unbroken run of tokens the policy sampled; tool and user tokens separate turns. Turn tensors are ``[B,
K]``, K the most turns of a row, with ``turn_mask`` True where the turn exists.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rl.algorithms.checks import check_in_range, check_mask, check_rewards, check_same_shape
from lit_rl.algorithms.groups import Groups


@torch.no_grad()
def turn_index(mask: Tensor) -> Tensor:
    """Return ``[B, T]`` int64: number of the turn, from 0, at the tokens the policy sampled, and -1 elsewhere."""
    check_mask(mask)
    before = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return torch.where(mask, (mask & ~before).cumsum(1) - 1, -1)


@torch.no_grad()
def turn_mask(mask: Tensor, num_turns: int) -> Tensor:
    """Return ``[B, num_turns]`` bool: True for the turns that the token mask ``[B, T]`` holds."""
    counts = turn_index(mask).amax(1, keepdim=True) + 1 if mask.shape[1] else mask.new_zeros((mask.shape[0], 1)).long()
    return torch.arange(num_turns, device=mask.device) < counts


@torch.no_grad()
def turn_returns(turn_rewards: Tensor, exists: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return the sum of rewards from each turn on, discounted once per *turn*, 0 where the turn does not exist.

    Args:
        turn_rewards: ``[B, K]`` float, finite where the turn exists; an outcome reward sits on the last turn.
        exists: ``[B, K]`` bool, from `turn_mask`.
        gamma: Discount per turn, in [0, 1].
    """
    _check_turns(turn_rewards, exists)
    check_in_range("gamma", gamma, 0.0, 1.0)
    num_turns = exists.shape[1]
    # Few turns: a matrix of powers gamma^(j - i) is simpler than a scan.
    ages = torch.arange(num_turns, device=exists.device)
    distance = (ages.unsqueeze(0) - ages.unsqueeze(1)).clamp(min=0).to(turn_rewards.dtype)  # [from, to]
    powers = torch.triu(torch.full_like(distance, gamma).pow(distance))
    return torch.where(exists, torch.where(exists, turn_rewards, 0.0) @ powers.t(), 0.0)


@torch.no_grad()
def turn_relative(
    turn_values: Tensor, exists: Tensor, group_ids: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Return group-relative advantages per turn: turn k is judged against turn k of the group's other trajectories.

    Rules as for `group_relative`: sample spread; a turn that only one trajectory of the group reaches gets 0.

    Args:
        turn_values: ``[N, K]`` float, returns from `turn_returns`, over all ranks.
        exists: ``[N, K]`` bool.
        group_ids: ``[N]`` int64.
        normalize_std: False leaves the division out.
        eps: Added to the standard deviation.

    Returns:
        ``[N, K]`` of the values' dtype, 0 where the turn does not exist.
    """
    _check_turns(turn_values, exists)
    num_turns = exists.shape[1]
    index = Groups.from_ids(group_ids).index.unsqueeze(1) * num_turns + torch.arange(num_turns, device=exists.device)
    groups = Groups.from_ids(index[exists])
    values = turn_values[exists]
    centred = groups.centre(values)
    if normalize_std:
        centred = centred / (groups.spread(values)[groups.index] + eps)
    advantages = torch.zeros_like(turn_values)
    advantages[exists] = centred.to(turn_values.dtype)
    return advantages


@torch.no_grad()
def spread_turns(turn_values: Tensor, mask: Tensor, *, only_last_token: bool = False) -> Tensor:
    """Return ``[B, T]`` with each turn's value at every token of the turn, or only at its last; 0 where masked.

    Args:
        turn_values: ``[B, K]`` float.
        mask: ``[B, T]`` bool.
        only_last_token: True places rewards for `gae` and `discounted_returns`, which add them up.
    """
    turns = turn_index(mask)
    if turn_values.dim() != 2 or turn_values.shape[0] != mask.shape[0] or bool((turns >= turn_values.shape[1]).any()):
        raise ValueError(
            f"turn_values has shape {tuple(turn_values.shape)}; the mask {tuple(mask.shape)} holds up to "
            f"{int(turns.max()) + 1 if turns.numel() else 0} turns per row. Pass [B, K] with K at least that number."
        )
    is_target = mask
    if only_last_token:
        is_target = mask & ~torch.nn.functional.pad(mask, (0, 1))[:, 1:]
    return torch.where(is_target, turn_values.gather(1, turns.clamp(min=0)), 0.0)


def _check_turns(turn_values: Tensor, exists: Tensor) -> None:
    check_mask(exists, "exists")
    check_same_shape(turn_values=turn_values, exists=exists)
    check_rewards(torch.where(exists, turn_values, 0.0), "turn_values")
