"""Dr. GRPO: GRPO without its two biases, towards long wrong answers and towards very easy or very hard prompts."""

from __future__ import annotations

from typing import Any

from lit_rl.modules.grpo import GRPO


class DrGRPO(GRPO):
    """GRPO done right: A = R - mean of the group, and every token's loss divided by a constant.

    Source: arXiv:2503.20783.
    """

    def __init__(
        self,
        model_name: str,
        loss_scale: float,
        normalize_std: bool = False,
        loss_agg_mode: str = "seq-mean-token-sum-norm",
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            loss_scale: The constant, in tokens, above 0; the paper takes the longest response allowed.
            normalize_std: Divide by the group's standard deviation; the paper does not.
            loss_agg_mode: How token losses become one number.
            kwargs: Options of `GRPO`.
        """
        super().__init__(
            model_name, loss_scale=loss_scale, normalize_std=normalize_std, loss_agg_mode=loss_agg_mode, **kwargs
        )
