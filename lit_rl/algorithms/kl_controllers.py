"""What sets the coefficient of a KL term from iteration to iteration; the KL may be in the loss or in the reward.

Controllers hold plain numbers and go into checkpoints through ``state_dict``.
"""

from __future__ import annotations


class FixedKLController:
    """A KL coefficient that never changes.

    Attributes:
        kl_coef: Weight of the KL term, >= 0; reward units (or loss units) per nat.
    """

    def __init__(self, kl_coef: float = 0.001) -> None:
        self.kl_coef = _checked_coefficient(kl_coef)

    def update(self, kl: float, num_sequences: int) -> None:
        """Do nothing; exists so that both controllers are called alike."""

    def state_dict(self) -> dict[str, float]:
        """Return ``{"kl_coef": ...}``."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Keep the configured coefficient: the configuration is the only source of hyper-parameters."""


class AdaptiveKLController:
    """A KL coefficient that rises while the KL is above its target and falls while it is below.

    Per update: ``kl_coef *= 1 + clip(kl / target_kl - 1, -0.2, 0.2) * min(num_sequences / horizon, 1)``.

    Attributes:
        kl_coef: Present weight of the KL term, >= 0; reward units (or loss units) per nat.

    Source: arXiv:1909.08593, section 2.2.
    """

    def __init__(self, kl_coef: float = 0.001, target_kl: float = 0.1, horizon: float = 10_000) -> None:
        """Args: ``target_kl`` in nats, > 0; ``horizon`` in sequences, > 0: larger adapts more slowly."""
        for name, value in (("target_kl", target_kl), ("horizon", horizon)):
            if value <= 0:
                raise ValueError(f"{name}={value} must be above 0.")
        self.kl_coef = _checked_coefficient(kl_coef)
        self.target_kl = target_kl
        self.horizon = horizon

    def update(self, kl: float, num_sequences: int) -> None:
        """Move the coefficient after an iteration.

        Args:
            kl: Mean KL of the iteration's tokens over all ranks, nats. NaN and infinity are refused with
                ``ValueError``.
            num_sequences: Sequences it was measured on, over all ranks.
        """
        if not -float("inf") < kl < float("inf"):
            raise ValueError(f"kl={kl} must be finite. Skip the update of an iteration without loss tokens.")
        error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
        # More sequences than the horizon would move the coefficient by over 20 % at once, in the end below zero.
        self.kl_coef *= 1.0 + error * min(num_sequences / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return ``{"kl_coef": ...}``, which is all that changes."""
        return {"kl_coef": self.kl_coef}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Take the coefficient up where it was."""
        self.kl_coef = float(state_dict["kl_coef"])


def _checked_coefficient(kl_coef: float) -> float:
    if not 0 <= kl_coef < float("inf"):
        raise ValueError(f"kl_coef={kl_coef} must be a finite number >= 0; 0 switches the KL term off.")
    return kl_coef
