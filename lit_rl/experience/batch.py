"""One iteration's experience and the pieces learning takes of it: mini-batches and micro-batches.

Position in the flow: collector -> **Experience** -> loader -> **MiniBatch** -> training_step -> **MicroBatch** ->
losses. Plain classes, since Lightning's precision plugins would cast the float tensors of dataclasses. Algorithms see
padded ``[B, T]`` tensors, the networks see the packed row; both are made here, per micro-batch, and nothing wider ever
exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_rl.algorithms.aggregate import prompt_mean_weights
from lit_rl.experience.flat import FlatTrajectories
from lit_rl.experience.plan import IterationPlan, MiniBatchPlan
from lit_rl.experience.progress import PhaseProgress
from lit_rl.models.packing import PackedSequences, pack
from lit_rl.types import Trajectory


class Experience:
    """A rank's share of one iteration, with the scalars of all ranks.

    Failed trajectories are in neither.

    Attributes:
        iteration: From 0.
        temperature: The one responses were sampled with; the trainer divides its logits by it.
        plan: Who computes what.
        trajectories: This rank's, ascending in their global index; records may be made on each access.
        indices: Global index of each of them, in [0, N).
        rewards: ``[N]`` float32, all ranks.
        group_ids: ``[N]`` int64, all ranks; equal for trajectories of one prompt.
        loss_tokens: ``[N]`` int64 tokens the policy sampled, all ranks.
        greedy_rewards: ``[N]`` float32, all ranks: reward of the greedy trajectory of the same prompt, NaN where it
            failed; ``None`` where no greedy trajectories were rolled out.
        metrics: Numbers of the rollout, ready to log.
        columns: Per-token values by name, one ``[T_i]`` float32 tensor per own trajectory; scoring fills them.
        advantages: ``[N]`` (one number per trajectory) or ``[B, T]`` (per token of the own ones); ``None`` before
            scoring.
        is_scored: Whether the scoring phase has run.
    """

    def __init__(
        self,
        *,
        iteration: int,
        temperature: float,
        plan: IterationPlan,
        trajectories: Sequence[Trajectory],
        indices: Sequence[int],
        rewards: Tensor,
        group_ids: Tensor,
        loss_tokens: Tensor,
        greedy_rewards: Tensor | None = None,
        share_prompts: bool = True,
        metrics: dict[str, float] | None = None,
        phase: PhaseProgress | None = None,
    ) -> None:
        self.iteration = iteration
        self.temperature = temperature
        self.plan = plan
        self.trajectories = trajectories
        self.indices = list(indices)
        self.rewards = rewards
        self.group_ids = group_ids
        self.loss_tokens = loss_tokens
        self.greedy_rewards = greedy_rewards
        self.share_prompts = share_prompts
        self.metrics = dict(metrics or {})
        self.phase = phase or PhaseProgress()
        if isinstance(trajectories, FlatTrajectories):
            logprobs = trajectories.tensors("rollout_logprobs")
            self._masks = [mask.view(torch.bool) for mask in trajectories.tensors("loss_mask")]
        else:
            logprobs = [torch.tensor(t.rollout_logprobs, dtype=torch.float32) for t in trajectories]
            self._masks = [torch.tensor(t.loss_mask, dtype=torch.bool) for t in trajectories]
        self.columns: dict[str, list[Tensor]] = {"rollout_logprobs": logprobs}
        self.advantages: Tensor | None = None
        self.is_scored = False
        self._local = {index: position for position, index in enumerate(self.indices)}

    def __len__(self) -> int:
        """Trajectories of this rank."""
        return len(self.trajectories)

    def local(self, indices: Sequence[int]) -> list[int]:
        """Positions of global indices among this rank's trajectories."""
        return [self._local[index] for index in indices]

    def padded(self, name: str, positions: Sequence[int]) -> Tensor:
        """One column of some own trajectories as ``[B, T]`` float32, zero where there is no token."""
        return _pad([self.columns[name][position] for position in positions])

    def loss_mask(self, positions: Sequence[int]) -> Tensor:
        """``[B, T]`` bool, True where the policy sampled the token."""
        return _pad([self._masks[position] for position in positions], dtype=torch.bool)

    def store(self, name: str, positions: Sequence[int], values: Tensor) -> None:
        """Keep ``[B, T]`` per-token values of some own trajectories as a column."""
        column = self.columns.setdefault(name, [torch.empty(0)] * len(self))
        for position, row in zip(positions, values.detach().float().cpu(), strict=True):
            column[position] = row[: len(self._masks[position])].clone()

    def advantages_of(self, positions: Sequence[int], num_columns: int) -> Tensor:
        """``[B, T]`` advantages of some own trajectories, zero where there is no token."""
        assert self.advantages is not None
        if self.advantages.dim() == 1:
            per_sequence = self.advantages[[self.indices[position] for position in positions]]
            return per_sequence[:, None].expand(-1, num_columns)
        return self.advantages[list(positions), :num_columns]

    def has_weight(self, index: int) -> bool:
        """Whether a trajectory (global index) of this rank has an advantage other than 0 at a sampled token."""
        assert self.advantages is not None
        if self.advantages.dim() == 1:
            return bool(self.advantages[index] != 0) and bool(self.loss_tokens[index] > 0)
        mask = self._masks[self._local[index]]
        return bool((self.advantages[self._local[index], : len(mask)][mask] != 0).any())


class MicroBatch:
    """What one forward and backward pass computes.

    Attributes:
        positions: Own trajectories in it.
        loss_mask: ``[B, T]`` bool, True where the policy sampled the token.
        rollout_logprobs: ``[B, T]`` float32, the engine's, in nats.
        old_logprobs: ``[B, T]`` float32, the trainer's before the iteration's first update, in nats. Where one update
            per iteration makes them the current ones, the module puts those here, detached.
        ref_logprobs: ``[B, T]`` float32 of the reference in nats, or ``None``.
        advantages: ``[B, T]`` float32.
        packed: The row the network computes.
        temperature: Of the sampling.
    """

    def __init__(self, experience: Experience, indices: Sequence[int], device: torch.device) -> None:
        self.experience = experience
        self.positions = experience.local(indices)
        self.device = device
        self.temperature = experience.temperature
        self.loss_mask = experience.loss_mask(self.positions).to(device)
        self.rollout_logprobs = self.column("rollout_logprobs")
        self.old_logprobs: Tensor | None = self.column("old_logprobs") if "old_logprobs" in experience.columns else None
        self.ref_logprobs: Tensor | None = self.column("ref_logprobs") if "ref_logprobs" in experience.columns else None
        trajectories = [experience.trajectories[position] for position in self.positions]
        self.packed: PackedSequences = pack(
            [t.prompt_ids for t in trajectories],
            [t.response_ids for t in trajectories],
            [t.loss_mask for t in trajectories],
            group_ids=[int(experience.group_ids[experience.indices[position]]) for position in self.positions],
            share_prompts=experience.share_prompts,
        ).to(device)

    @property
    def advantages(self) -> Tensor:
        """``[B, T]`` float32; known once the experience is scored."""
        return self.experience.advantages_of(self.positions, self.loss_mask.shape[1]).to(self.device)

    def column(self, name: str) -> Tensor:
        """``[B, T]`` float32 column of the experience, such as one that an algorithm scored."""
        return self.experience.padded(name, self.positions).to(self.device)


class MiniBatch:
    """What one optimizer step learns from: Lightning's batch.

    Attributes:
        experience: The iteration it belongs to.
        epoch: Pass over the experience, from 0.
        index: Optimizer step within the pass, from 0.
        plan: Its share of the plan, with the global counts that normalise the loss.
        is_first: Whether it is the iteration's first.
        is_last: Whether it is the iteration's last.
    """

    def __init__(self, experience: Experience, epoch: int, index: int, rank: int) -> None:
        self.experience = experience
        self.epoch = epoch
        self.index = index
        self.rank = rank
        self.plan: MiniBatchPlan = experience.plan.mini_batch(epoch, index)
        passes = experience.plan.mini_batches
        self.is_first = epoch == 0 and index == 0
        self.is_last = epoch == len(passes) - 1 and index == len(passes[epoch]) - 1
        self.device = torch.device("cpu")
        self._prompt_weights: dict[int, float] | None = None

    def to(self, device: torch.device | str, *args: object, **kwargs: object) -> MiniBatch:
        """Take the device micro-batches are made on; the experience itself stays on CPU."""
        self.device = torch.device(device)
        return self

    @property
    def indices(self) -> list[list[int]]:
        """Global indices of each of this rank's micro-batches."""
        return self.plan.micro_batches[self.rank] if self.plan.micro_batches else []

    def prompt_weights(self, batch: MicroBatch) -> Tensor:
        """``[B]`` float32: what each sequence's summed token loss counts for in the loss mode ``prompt-mean``."""
        if self._prompt_weights is None:
            members = [i for indices_of_rank in self.plan.micro_batches for indices in indices_of_rank for i in indices]
            weights = prompt_mean_weights(self.experience.loss_tokens[members], self.experience.group_ids[members])
            self._prompt_weights = dict(zip(members, weights.tolist(), strict=True))
        indices = [self.experience.indices[position] for position in batch.positions]
        return torch.tensor([self._prompt_weights[index] for index in indices], device=self.device)

    def weighted_indices(self) -> list[list[int]]:
        """The micro-batches without trajectories whose advantage is 0, and without those that then are empty."""
        kept = [[i for i in indices if self.experience.has_weight(i)] for indices in self.indices]
        return [indices for indices in kept if indices]

    def micro_batches(
        self, indices: Sequence[Sequence[int]] | None = None, at_least: int = 0
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield each micro-batch with whether it is the last.

        Args:
            indices: Global indices of each; ``None`` takes all of the plan.
            at_least: So many, the last ones empty: all ranks must run the same number.
        """
        kept: list[Sequence[int]] = list(self.indices if indices is None else indices)
        kept += [()] * (at_least - len(kept))
        for number, members in enumerate(kept):
            yield MicroBatch(self.experience, members, self.device), number == len(kept) - 1


def _pad(rows: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Stack 1-D tensors to ``[B, T]``, zeros at the ends; ``[0, 0]`` for none."""
    return pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=dtype)
