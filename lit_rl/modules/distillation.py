"""On-policy distillation: the policy learns from teachers' log-probs of what it sampled itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_rl.algorithms.aggregate import masked_mean
from lit_rl.algorithms.distillation import TAILS, distillation_advantages, forward_kl_topk, reverse_kl, topk_mass
from lit_rl.experience.batch import Experience, MicroBatch, MiniBatch
from lit_rl.models.actor import TokenScores
from lit_rl.modules.clipped_policy import ClippedPolicyModule
from lit_rl.modules.group_relative import GroupRelativeModule
from lit_rl.modules.option_ranges import check_choice, check_number
from lit_rl.modules.teacher_scored import TeacherScoredModule
from lit_rl.serving.teachers import TeacherSettings

LOSSES = ("advantage", "k1+", "k2", "k3", "k3+", "abs", "forward-kl")


class OnPolicyDistillation(TeacherScoredModule, ClippedPolicyModule, GroupRelativeModule):
    """Pulls the policy towards teachers on its own samples, alone or beside a reward.

    With p_T the teacher's and p_S the policy's probability of a token, its advantage is ``reward_coef`` A +
    ``distillation_coef`` (log p_T - log p_S), A the group-relative one: reverse KL as a reward. Or a divergence is a
    term of the loss: an estimator of reverse KL, or forward KL over the teacher's ``top_k`` most likely tokens.

    Source: arXiv:2306.13649 (on-policy samples, both divergences), arXiv:2306.08543 (reverse KL by policy gradient).
    """

    def __init__(
        self,
        model_name: str,
        teachers: dict[str, TeacherSettings],
        distillation_loss: str = "advantage",
        distillation_coef: float = 1.0,
        reward_coef: float = 0.0,
        top_k: int = 32,
        tail: str = "bucket",
        max_gap: float | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the options.

        Args:
            model_name: Policy network: a bundled name, a hub id, or a folder.
            teachers: By a name of your choice; served beside the policy's replicas.
            distillation_loss: ``advantage``; reverse KL as a loss term (``k1+``, ``k2``, ``k3``, ``k3+``, ``abs``); or
                ``forward-kl``.
            distillation_coef: Weight of the teachers, at least 0.
            reward_coef: Weight of the rewards' group-relative advantages, at least 0; 0 ignores rewards.
            top_k: Teacher's tokens that ``forward-kl`` sums over, at least 1.
            tail: What becomes of the others: ``ignore``, ``renormalize`` or ``bucket``; see `forward_kl_topk`.
            max_gap: Bound in nats on a token's log p_T - log p_S, or its forward KL, above 0; ``null`` is none.
            kwargs: Options of `ClippedPolicyModule` and `GroupRelativeModule`.
        """
        check_choice("distillation_loss", distillation_loss, LOSSES)
        check_choice("tail", tail, TAILS)
        check_number("distillation_coef", distillation_coef, at_least=0)
        check_number("reward_coef", reward_coef, at_least=0)
        check_number("top_k", top_k, at_least=1)
        check_number("max_gap", max_gap, above=0)
        super().__init__(model_name, teachers, top_k if distillation_loss == "forward-kl" else 0, **kwargs)
        self.distillation_loss, self.distillation_coef = distillation_loss, distillation_coef
        self.reward_coef, self.tail, self.max_gap = reward_coef, tail, max_gap
        self.min_group_size = 2 if reward_coef else 1
        self._scores: TokenScores | None = None

    @property
    def weighs_every_token(self) -> bool:
        """A divergence in the loss weighs tokens of advantage 0, too."""
        return super().weighs_every_token or self.distillation_loss != "advantage"

    def needs_old_logprobs(self, experience: Experience) -> bool:
        """For the advantages, beside the usual reasons."""
        is_needed = self.distillation_loss == "advantage" and not self._corrector.bypass
        return super().needs_old_logprobs(experience) or is_needed

    def compute_advantages(self, experience: Experience) -> Tensor:
        """``[N]`` of the rewards, or ``[B, T]`` with the teachers' share."""
        of_rewards = self.reward_coef * super().compute_advantages(experience)
        if self.distillation_loss != "advantage":
            return of_rewards
        own = range(len(experience))
        old = experience.padded("rollout_logprobs" if self._corrector.bypass else "old_logprobs", own)
        gaps = distillation_advantages(old, experience.padded("teacher_logprobs", own), max_abs=self.max_gap)
        advantages = of_rewards[experience.indices][:, None] + self.distillation_coef * gaps
        return torch.where(experience.loss_mask(own), advantages, 0.0)

    def forward_actor(self, batch: MicroBatch, **options: Any) -> TokenScores:
        """Score the teachers' most likely tokens, too, where the loss needs them."""
        if self.distillation_loss == "forward-kl" and torch.is_grad_enabled():
            options["candidate_ids"] = batch.column("teacher_top_ids")
        self._scores = super().forward_actor(batch, **options)
        return self._scores

    def micro_batch_loss(self, batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        """Policy loss, and the divergence where it is a loss term."""
        loss = super().micro_batch_loss(batch, mini_batch)
        assert self._scores is not None
        scores, self._scores = self._scores, None
        teacher, mask = batch.column("teacher_logprobs"), batch.loss_mask
        self.metrics.mean("distillation/reverse_kl", masked_mean(scores.logprobs.detach() - teacher, mask), mask.sum())
        if self.distillation_loss == "advantage":
            return loss
        divergence = self.distillation_coef * self._divergence(scores, batch, teacher)
        return loss + self.note_loss("distillation/loss", self.aggregate(divergence, batch, mini_batch))

    def _divergence(self, scores: TokenScores, batch: MicroBatch, teacher: Tensor) -> Tensor:
        """``[B, T]`` nats."""
        if scores.candidate_logprobs is None:
            return reverse_kl(scores.logprobs, teacher, self.distillation_loss)
        student, top, mask = scores.candidate_logprobs, batch.column("teacher_top_logprobs"), batch.loss_mask
        for name, logprobs in (("student", student.detach()), ("teacher", top)):
            self.metrics.mean(f"distillation/{name}_mass", masked_mean(topk_mass(logprobs), mask), mask.sum())
        return forward_kl_topk(student, top, tail=self.tail, max_loss=self.max_gap)
