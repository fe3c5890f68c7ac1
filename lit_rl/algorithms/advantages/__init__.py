"""Advantage estimators: rewards in, advantages out, one family per file."""

from lit_rl.algorithms.advantages.group_relative import check_group_size, group_relative, zero_spread_share

__all__ = ["check_group_size", "group_relative", "zero_spread_share"]
