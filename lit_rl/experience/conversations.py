"""Demonstrations in optimizer steps: what an iteration of supervised fine-tuning trains on, and what it is measured on.

Position in the flow: conversation tokens -> **loader** -> training_step. Every rank plans the same iteration from the
same lengths, as for experience, so losses are normalised by the tokens of all ranks whatever the packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_rl.data import ConversationTokens, PromptCursor
from lit_rl.experience.plan import IterationPlan, MiniBatchPlan, plan_iteration
from lit_rl.experience.progress import PhaseProgress
from lit_rl.models.packing import PackedSequences, pack


class ConversationMicroBatch:
    """What one forward and backward pass computes.

    Attributes:
        packed: The row the network computes.
        loss_mask: ``[B, T]`` bool, True where the token is learned.
        temperature: 1: demonstrations are learned as they are.
    """

    temperature = 1.0

    def __init__(self, rows: Sequence[ConversationTokens], device: torch.device) -> None:
        self.packed: PackedSequences = pack(
            [row.prompt_ids for row in rows],
            [row.response_ids for row in rows],
            [row.loss_mask for row in rows],
            share_prompts=False,
        ).to(device)
        masks = [torch.tensor(row.loss_mask, dtype=torch.bool) for row in rows]
        padded: Tensor = pad_sequence(masks, batch_first=True) if masks else torch.zeros(0, 0, dtype=torch.bool)
        self.loss_mask = padded.to(device)


class ConversationBatch:
    """What one optimizer step learns from: Lightning's batch. A plain class, which precision plugins leave alone.

    Attributes:
        rows: Conversations of the iteration; ``plan`` names those of this step.
        plan: The step's share of the plan, with the tokens of all ranks.
        index: Step within the iteration, from 0.
        is_first: Whether it is the iteration's first.
        is_last: Whether it is the iteration's last.
        phase: What the display shows.
    """

    def __init__(
        self, rows: Sequence[ConversationTokens], plan: IterationPlan, index: int, rank: int, phase: PhaseProgress
    ) -> None:
        self.rows = rows
        self.plan: MiniBatchPlan = plan.mini_batch(0, index)
        self.index = index
        self.num_steps = len(plan.mini_batches[0])
        self.is_first = index == 0
        self.is_last = index == self.num_steps - 1
        self.rank = rank
        self.phase = phase
        self.device = torch.device("cpu")

    def to(self, device: torch.device | str, *args: object, **kwargs: object) -> ConversationBatch:
        """Take the device micro-batches are made on."""
        self.device = torch.device(device)
        return self

    @property
    def num_tokens(self) -> int:
        """Tokens of this step's conversations, over all ranks."""
        return sum(self.rows[i].length for bins in self.plan.micro_batches for one in bins for i in one)

    def micro_batches(self) -> Iterator[tuple[ConversationMicroBatch, bool]]:
        """Yield each of this rank's micro-batches with whether it is the last."""
        own = self.plan.micro_batches[self.rank] if self.plan.micro_batches else []
        for number, indices in enumerate(own):
            yield ConversationMicroBatch([self.rows[i] for i in indices], self.device), number == len(own) - 1


class ConversationLoader:
    """Lightning's dataloader of demonstrations: one pass over it is one iteration.

    Sized and lazy, and nothing happens after the last ``yield`` (see `lit_rl.experience.loader`).

    Args:
        rows: All conversations.
        cursor: Says which come next; ``None`` takes all in their order, for validation.
        batch_size: Most conversations of an optimizer step, over all ranks.
        num_steps: Optimizer steps per iteration; ``None`` makes it one pass over the rows.
        max_tokens: Most tokens of a forward and backward pass.
        phase: What the display shows.
        world_size: Data-parallel ranks.
        rank: Whose micro-batches are dealt.
    """

    def __init__(
        self,
        rows: Sequence[ConversationTokens],
        cursor: PromptCursor | None,
        *,
        batch_size: int,
        num_steps: int | None,
        max_tokens: int,
        phase: PhaseProgress,
        world_size: int = 1,
        rank: int = 0,
    ) -> None:
        self.rows = rows
        self.cursor = cursor
        self.batch_size = batch_size
        self.num_steps = num_steps
        self.max_tokens = max_tokens
        self.phase = phase
        self.world_size = world_size
        self.rank = rank

    def __len__(self) -> int:
        """Optimizer steps per iteration."""
        return self.num_steps or -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[ConversationBatch]:
        """Take the next rows, plan, then yield each step."""
        count = len(self.rows) if self.num_steps is None else self.num_steps * self.batch_size
        chosen = range(count) if self.cursor is None else self.cursor.next(count)
        rows = [self.rows[index] for index in chosen]
        plan = plan_iteration(
            [row.length for row in rows],
            self.world_size,
            len(self),
            1,
            self.max_tokens,
            0,
            loss_tokens=[row.num_loss_tokens for row in rows],
            prompt_lengths=[len(row.prompt_ids) for row in rows],
            # In the cursor's order, which is random already: consecutive runs, none larger than batch_size.
            shuffle=False,
        )
        for index in range(len(self)):
            yield ConversationBatch(rows, plan, index, self.rank, self.phase)
