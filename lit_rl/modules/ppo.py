"""PPO: the clipped loss on advantages that a learned critic estimates."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

from lit_rl.algorithms.advantages import gae
from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.value_losses import clipped_value_loss, explained_variance, value_clip_fraction
from lit_rl.experience.batch import Experience, MicroBatch, MiniBatch
from lit_rl.models import Critic, load_causal_lm
from lit_rl.modules.option_ranges import check_critic_options
from lit_rl.modules.token_rewards import TokenRewardModule


class PPO(TokenRewardModule):
    """Proximal policy optimization with a critic.

    A_t = delta_t + ``gamma`` ``lam`` A_t+1, delta_t = r_t + ``gamma`` V_t+1 - V_t over the sampled tokens, whitened
    over the iteration. The critic V is fitted to A + V (before whitening) with a clipped squared error, in the same
    backward pass and optimizer, as the parameter group ``critic``.

    Source: arXiv:1707.06347; advantages arXiv:1506.02438, eq. 16.
    """

    def __init__(
        self,
        model_name: str,
        critic_name: str | None = None,
        critic_lr: float = 1e-5,
        critic_max_grad_norm: float = 1.0,
        critic_warmup_iterations: int = 0,
        gamma: float = 1.0,
        lam: float = 1.0,
        value_clip: float = 0.5,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            critic_name: Network whose backbone the critic begins from; ``null`` takes ``model_name``.
            critic_lr: Learning rate of the critic, above 0.
            critic_max_grad_norm: Largest norm of the critic's gradient, clipped apart from the actor's.
            critic_warmup_iterations: First iterations in which only the critic learns, at least 0.
            gamma: Discount per sampled token, in [0, 1].
            lam: Trade of bias for variance, in [0, 1]; 1 gives the whole return minus the value.
            value_clip: Furthest a value moves in an iteration, reward units, above 0; a large number is no limit.
            kwargs: Options of `TokenRewardModule`.
        """
        super().__init__(model_name, **kwargs)
        self.critic_name = critic_name or model_name
        self.max_grad_norms["critic"] = critic_max_grad_norm
        self.critic_lr, self.critic_warmup_iterations = critic_lr, critic_warmup_iterations
        self.gamma, self.lam, self.value_clip = gamma, lam, value_clip
        check_critic_options(self, critic_max_grad_norm=critic_max_grad_norm)
        self.critic: Critic | None = None

    @property
    def weighs_every_token(self) -> bool:
        """The critic learns from every token."""
        return True

    @property
    def updates_actor(self) -> bool:
        """Not while the critic warms up."""
        return bool(self.current_epoch >= self.critic_warmup_iterations)

    def configure_model(self) -> None:
        """Load actor, critic and reference."""
        super().configure_model()
        if self.critic is None:
            self.critic = Critic(load_causal_lm(self.critic_name), gradient_checkpointing=self.gradient_checkpointing)
            if self.uses_bf16_working_copy():
                self.critic.enable_bf16_working_copy()

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The actor's and the critic's."""
        assert self.critic is not None
        (actor,) = super().parameter_groups()
        return [actor, {**actor, "name": "critic", "params": list(self.critic.parameters()), "lr": self.critic_lr}]

    def score_more(self, experience: Experience) -> None:
        """Score the values of the critic as it is before the update."""
        self.score_column("values", experience, self._values, timer="values")

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[B, T]`` whitened generalized advantage estimates of this rank's tokens."""
        positions = range(len(experience))
        mask, values = experience.loss_mask(positions), experience.padded("values", positions)
        advantages, returns = self.estimate(self.token_rewards(experience), values, mask)
        experience.store("returns", positions, returns)
        for name, columns in (("values/mean", values), ("returns/mean", returns)):
            self.metrics.mean(f"critic/{name}", masked_mean(columns, mask), mask.sum())
        self.metrics.mean("critic/vf_explained_var", explained_variance(values, returns, mask), mask.sum())
        return self.whiten_tokens(advantages, mask)

    def estimate(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages (not whitened) and the returns that the critic is fitted to, each ``[B, T]``."""
        return gae(rewards, values, mask, gamma=self.gamma, lam=self.lam)

    def micro_batch_loss(self, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        """Policy loss plus value loss; in warm-up the actor is only watched."""
        # Strategies wait for every parameter's gradient; it is zero, and dropped where the strategy leaves that to us.
        with torch.set_grad_enabled(self.updates_actor or isinstance(self.trainer.strategy, ParallelStrategy)):
            loss = super().micro_batch_loss(batch, mini_batch) * float(self.updates_actor)
        values, mask = self._values(batch), batch.loss_mask
        old_values, returns = batch.column("values"), batch.column("returns")
        token_loss = clipped_value_loss(values, old_values, returns, clip_range=self.value_clip)
        clipped = value_clip_fraction(values.detach(), old_values, returns, mask, clip_range=self.value_clip)
        self.metrics.mean("critic/vf_clipfrac", clipped, mask.sum())
        return loss + self.note_loss("critic/vf_loss", self.aggregate(token_loss, batch, mini_batch))

    def _values(self, batch: MicroBatch) -> Tensor:
        assert self.critic is not None
        return self.critic(batch.packed)
