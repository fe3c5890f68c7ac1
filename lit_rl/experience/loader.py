"""Lightning's train dataloader: one pass over it is one iteration.

Sized and lazy (design D1). A sized loader is not prefetched, so `__iter__` collects when the iteration starts and not
before; and it is not resumed after its last item, so nothing may happen after the last ``yield``. It yields exactly
``len`` mini-batches, since a short loader would never report its last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lit_rl.experience.batch import Experience, MiniBatch


class ExperienceLoader:
    """Collects an iteration's experience and deals it out in mini-batches."""

    def __init__(
        self, collect: Callable[[], Experience], ppo_epochs: int, num_mini_batches: int, rank: int = 0
    ) -> None:
        """Keep how to collect.

        Args:
            collect: Rolls out one iteration; called once per pass over the loader.
            ppo_epochs: Passes over the experience.
            num_mini_batches: Optimizer steps per pass.
            rank: Data-parallel rank whose micro-batches are dealt.
        """
        self.collect = collect
        self.ppo_epochs = ppo_epochs
        self.num_mini_batches = num_mini_batches
        self.rank = rank

    def __len__(self) -> int:
        """Optimizer steps per iteration."""
        return self.ppo_epochs * self.num_mini_batches

    def __iter__(self) -> Iterator[MiniBatch]:
        """Collect, then yield each mini-batch of each pass."""
        experience = self.collect()
        for epoch in range(self.ppo_epochs):
            for index in range(self.num_mini_batches):
                yield MiniBatch(experience, epoch, index, self.rank)
