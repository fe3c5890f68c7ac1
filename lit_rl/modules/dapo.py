"""DAPO: GRPO with a higher upper clip, a mean over tokens, dynamic sampling and a soft penalty of overlong answers."""

from __future__ import annotations

from typing import Any

from lit_rl.modules.grpo import GRPO


class DAPO(GRPO):
    """Decoupled clip and dynamic sampling policy optimization.

    Clip-higher and the token mean are here. The other two parts belong to the rollout and are options of the data:
    ``data.dynamic_sampling_rounds`` replaces groups of equal rewards by groups of fresh prompts, and
    ``data.rewards.overlong`` is the soft penalty. ``configs/algorithms/dapo.yaml`` sets all four.

    Source: arXiv:2503.14476.
    """

    def __init__(
        self,
        model_name: str,
        clip_ratio_low: float = 0.2,
        clip_ratio_high: float = 0.28,
        clip_ratio_c: float | None = None,
        loss_agg_mode: str = "token-mean",
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            clip_ratio_low: The paper's epsilon_low, in (0, 1).
            clip_ratio_high: The paper's epsilon_high, above 0; above ``clip_ratio_low`` it lets unlikely tokens grow.
            clip_ratio_c: Bound on the ratio of negative advantages, above 1; the paper has none.
            loss_agg_mode: How token losses become one number.
            kwargs: Options of `GRPO`.
        """
        super().__init__(
            model_name,
            clip_ratio_low=clip_ratio_low,
            clip_ratio_high=clip_ratio_high,
            clip_ratio_c=clip_ratio_c,
            loss_agg_mode=loss_agg_mode,
            **kwargs,
        )
