"""Ranges of the modules' options, checked when a module is built and before anything starts.

NaN and infinity are outside every range: YAML accepts ``.nan``, and with NaN every later comparison is silently false.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from lit_rl.algorithms.aggregate import AGGREGATION_MODES
from lit_rl.algorithms.kl import KL_KINDS


def check_number(
    option: str,
    value: float | None,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """Raise ``ValueError``, naming option, value and rule, unless a number is finite and in its range.

    Args:
        option: Name below ``model.``.
        value: ``None`` is an option that is off.
        at_least: Smallest value allowed.
        at_most: Largest value allowed.
        above: Bound the value must exceed.
        below: Bound the value must stay under.
    """
    if value is None:
        return
    is_inside = (
        math.isfinite(value)
        and (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
        and (above is None or value > above)
        and (below is None or value < below)
    )
    if not is_inside:
        bounds = {"at least": at_least, "at most": at_most, "above": above, "below": below}
        rules = [f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None]
        rule = " and ".join(rules)
        if not math.isfinite(value):
            rule = f"{rule}, and finite" if rule else "finite"
        raise ValueError(f"model.{option}={value} must be {rule}.")


def check_choice(option: str, value: str, choices: Collection[str]) -> None:
    """Raise ``ValueError``, naming option, value and choices, unless a value is one of them."""
    if value not in choices:
        raise ValueError(f"model.{option}={value!r} must be one of {', '.join(choices)}.")


def check_optimizer_options(module: Any) -> None:
    """Raise ``ValueError`` where an option of the optimizer is out of range.

    Args:
        module: A `PolicyModule` with its options set.
    """
    for option in ("actor_lr", "adam_eps"):
        check_number(option, getattr(module, option), above=0)
    for option in ("weight_decay", "lr_warmup_iterations"):
        check_number(option, getattr(module, option), at_least=0)
    for beta in module.betas:
        check_number("betas", beta, at_least=0, below=1)


def check_update_options(module: Any, *, max_grad_norm: float, max_skipped_steps: int) -> None:
    """Raise ``ValueError`` where an option could only fail, or silently not learn, once everything has started.

    Args:
        module: A `PolicyGradientModule` with its options set.
        max_grad_norm: As in its constructor.
        max_skipped_steps: As in its constructor.
    """
    check_number("loss_scale", module.loss_scale, above=0)
    for option in ("kl_loss_coef", "logprob_gap_warning"):
        check_number(option, getattr(module, option), at_least=0)
    check_number("entropy_coef", module.entropy_coef)
    check_number("max_skipped_steps", max_skipped_steps, at_least=1)
    check_choice("loss_agg_mode", module.loss_agg_mode, AGGREGATION_MODES)
    check_choice("kl_loss_type", module.kl_loss_type, [*KL_KINDS, *(f"{kind}+" for kind in KL_KINDS)])
    if not max_grad_norm > 0:
        raise ValueError(f"model.max_grad_norm={max_grad_norm} must be above 0; a large number switches clipping off.")
    if module.loss_agg_mode == "seq-mean-token-sum-norm" and module.loss_scale is None:
        raise ValueError(
            "model.loss_agg_mode='seq-mean-token-sum-norm' needs model.loss_scale, a constant length in tokens: the "
            "longest response allowed (data.max_response_tokens) is usual."
        )


def check_critic_options(module: Any, *, critic_max_grad_norm: float) -> None:
    """Raise ``ValueError`` where an option of the critic is out of range.

    Args:
        module: A `PPO` with its options set.
        critic_max_grad_norm: As in its constructor.
    """
    check_number("critic_max_grad_norm", critic_max_grad_norm, above=0)
    for option in ("critic_lr", "value_clip"):
        check_number(option, getattr(module, option), above=0)
    for option in ("gamma", "lam"):
        check_number(option, getattr(module, option), at_least=0, at_most=1)
    check_number("critic_warmup_iterations", module.critic_warmup_iterations, at_least=0)
