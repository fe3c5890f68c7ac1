"""A new algorithm in two methods: advantages by rank, and a policy gradient without a clip.

Run: PYTHONPATH=examples lit-rl fit --config configs/base/trainer_cpu.yaml --config configs/grpo_arithmetic.yaml \
    --model custom_algorithm.RankPolicy
"""

from torch import Tensor

from lit_rl.experience.batch import Experience, MicroBatch
from lit_rl.modules import PolicyGradientModule


class RankPolicy(PolicyGradientModule):
    """Learns from the order of the rewards, whatever their scale; equal rewards share a rank."""

    def compute_advantages(self, experience: Experience) -> Tensor:
        rewards = experience.rewards  # [N], all trajectories of the iteration
        above = (rewards[:, None] > rewards).float().mean(1)
        return above - (rewards[:, None] < rewards).float().mean(1)

    def policy_loss(self, logprobs: Tensor, batch: MicroBatch) -> Tensor:
        return -batch.advantages * (logprobs - batch.old_logprobs).exp()  # [B, T]
