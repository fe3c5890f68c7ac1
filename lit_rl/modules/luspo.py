"""LUSPO: GSPO whose sequences weigh by their length."""

from __future__ import annotations

from typing import Any

from lit_rl.modules.gspo import GSPO


class LUSPO(GSPO):
    """Length-unbiased sequence policy optimization.

    GSPO's loss of a sequence times its number of tokens: the clipped loss with the sequence's ratio at every token,
    summed over its tokens and averaged over sequences. A long answer is not pushed less per token than a short one.

    Source: arXiv:2602.05261.
    """

    def __init__(self, model_name: str, loss_agg_mode: str = "seq-mean-token-sum", **kwargs: Any) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            loss_agg_mode: How token losses become one number.
            kwargs: Options of `GSPO`.
        """
        super().__init__(model_name, loss_agg_mode=loss_agg_mode, **kwargs)
