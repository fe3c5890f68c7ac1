"""Group-relative advantages: a trajectory is judged against the others of its prompt (GRPO, Dr.GRPO).

One scalar per sequence in, one per sequence out; the caller spreads it over the sequence's tokens. The rows are all
sequences of the iteration over all ranks, so the baseline does not depend on which rank holds which sequence.
"""

from __future__ import annotations

from torch import Tensor

from lit_rl.algorithms.checks import check_grouped
from lit_rl.algorithms.groups import Groups


def group_relative(rewards: Tensor, group_ids: Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Return the reward minus the group's mean, divided by the group's sample standard deviation.

    Rules: the spread is the *sample* one (divisor n - 1). A group whose rewards are all equal, and so a group of one,
    gets exactly 0: it says nothing about which answer is better. Failed trajectories must not be in the input.

    Args:
        rewards: ``[N]`` float, finite, reward units; one per sequence, over all ranks.
        group_ids: ``[N]`` int64; rows of one prompt share an id, in any order.
        normalize_std: False leaves the division out (Dr.GRPO), which does not favour very easy and very hard prompts.
        eps: Added to the standard deviation, reward units.

    Returns:
        ``[N]`` advantages of the rewards' dtype, in standard deviations (or in reward units without division).

    Raises:
        ValueError: If shapes or dtypes are wrong, or a reward is NaN or infinite.

    Source: arXiv:2402.03300, section 4.1.2; without division arXiv:2503.20783.
    """
    check_grouped(rewards, group_ids)
    groups = Groups.from_ids(group_ids)
    centred = groups.centre(rewards)
    if normalize_std:
        centred = centred / (groups.spread(rewards)[groups.index] + eps)
    return centred.to(rewards.dtype)


def batch_scaled_relative(rewards: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return the reward minus the group's mean, divided by the sample standard deviation of all rewards.

    Rules as for `group_relative`; where all rewards of all groups are equal every advantage is 0.

    Args:
        rewards: ``[N]`` float, finite, reward units; one per sequence, over all ranks.
        group_ids: ``[N]`` int64.
        eps: Added to the standard deviation, reward units.

    Returns:
        ``[N]`` advantages of the rewards' dtype, in standard deviations.

    Source: arXiv:2508.08221 (Lite PPO).
    """
    check_grouped(rewards, group_ids)
    centred = Groups.from_ids(group_ids).centre(rewards)
    if rewards.numel() < 2:
        return centred.to(rewards.dtype)
    return (centred / (rewards.double().std() + eps)).to(rewards.dtype)


def zero_spread_share(rewards: Tensor, group_ids: Tensor) -> float:
    """Return the share, in [0, 1], of groups whose rewards are all equal; 0 for no group at all.

    Such groups give no gradient. A group of one counts as one of them.

    Args:
        rewards: ``[N]`` float, finite.
        group_ids: ``[N]`` int64.
    """
    check_grouped(rewards, group_ids)
    groups = Groups.from_ids(group_ids)
    if groups.num_groups == 0:
        return 0.0
    return float(groups.has_no_spread(rewards).double().mean())


def check_group_size(group_size: int, method: str) -> None:
    """Raise ``ValueError`` where a method with a group baseline would get groups of one.

    For the start of a run: with one sample per prompt every such advantage is 0 and nothing is ever learned.
    """
    if group_size < 2:
        raise ValueError(
            f"data.group_size={group_size}: {method} compares the trajectories of a prompt with each other and needs "
            "at least 2. Raise data.group_size, or use a method without a group baseline (REINFORCE++, ReMax, PPO)."
        )
