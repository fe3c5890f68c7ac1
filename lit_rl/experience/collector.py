"""Roll out one iteration: rows from the cursor, trajectories from the agent loops, experience for the loader.

Position in the flow: cursor -> **collector** -> agent-loop manager -> **collector** -> shares of ranks -> loader. It
gates on the policy version, derives every trajectory's seed, replaces groups that teach nothing, and leaves failed
trajectories out. It computes nothing that needs a network, and runs on rank 0 alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from lit_rl.agents import AgentLoopManager, TrajectoryRequest
from lit_rl.cluster import Runtime
from lit_rl.experience.dynamic_sampling import sample_until_spread
from lit_rl.experience.progress import PhaseProgress
from lit_rl.experience.recording import ReplayedRollouts, TrajectoryRecorder
from lit_rl.experience.share import Rollout, SequenceScalars
from lit_rl.metrics.rollout import rollout_metrics
from lit_rl.serving import LLMServerManager
from lit_rl.types import Prompt, SamplingParams, Trajectory


class Collector:
    """Turns rows into rollouts, iteration by iteration, and into scored trajectories for validation."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        agents: AgentLoopManager | ReplayedRollouts,
        servers: LLMServerManager | ReplayedRollouts,
        phase: PhaseProgress,
        seed: int,
        timeout_s: float,
        recorder: TrajectoryRecorder | None = None,
    ) -> None:
        """Keep the managers.

        Args:
            runtime: Whose event loop rollouts run on.
            agents: Runs conversations.
            servers: Knows which weights the replicas hold.
            phase: Where progress is told.
            seed: Root of all sampling seeds.
            timeout_s: Longest rollout in seconds.
            recorder: Keeps what was rolled out to learn from.
        """
        self.runtime = runtime
        self.agents = agents
        self.servers = servers
        self.phase = phase
        self.seed = seed
        self.timeout_s = timeout_s
        self.recorder = recorder
        self.last_trajectories: list[Trajectory] = []

    def collect(
        self,
        iteration: int,
        rows: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        group_size: int,
        greedy_baseline: bool = False,
        dynamic_sampling_rounds: int = 0,
        next_rows: Callable[[int], Sequence[Prompt]] = lambda num: (),
    ) -> Rollout:
        """Roll out ``group_size`` trajectories of each row.

        Args:
            iteration: From 0.
            rows: To begin with.
            sampling: Of the trajectories that are learnt from.
            group_size: Trajectories per row.
            greedy_baseline: Also roll out one greedy trajectory per row, for its reward only.
            dynamic_sampling_rounds: How often groups of equal rewards are replaced by groups of fresh rows.
            next_rows: Takes so many fresh rows from the cursor.

        Raises:
            RuntimeError: If the replicas do not hold the weights of this iteration.
        """
        self.servers.require_version(iteration, iteration)
        greedy: list[Trajectory] = []

        def roll_out(fresh: Sequence[Prompt], first_number: int) -> list[Trajectory]:
            requests = self._requests(iteration, fresh, first_number, range(group_size))
            if not greedy_baseline:
                return self._generate("rollout", requests, sampling)
            # It comes after the samples of its group, so that its index and seed are its own.
            greedy_requests = self._requests(iteration, fresh, first_number, range(group_size, group_size + 1))
            sampled, baselines = self._generate_both(requests, sampling, greedy_requests, _greedy(sampling))
            greedy.extend(baselines)
            return sampled

        started = time.perf_counter()
        sampled = sample_until_spread(rows, roll_out, next_rows, dynamic_sampling_rounds)
        seconds = time.perf_counter() - started
        self.last_trajectories = sampled.everything
        if self.recorder is not None:
            self.recorder.write(iteration, [*sampled.everything, *greedy])
        greedy_rewards = {trajectory.group_id: _reward_or_nan(trajectory) for trajectory in greedy}
        sequences = [sequence for trajectory in sampled.kept for sequence in (trajectory, *trajectory.branches)]
        usable = [sequence for sequence in sequences if not sequence.has_failed]
        group_numbers = _dense_numbers([trajectory.group_id for trajectory in usable])
        prompts = [(group, tuple(t.prompt_ids)) for group, t in zip(group_numbers, usable, strict=True)]
        return Rollout(
            scalars=SequenceScalars(
                iteration=iteration,
                temperature=sampling.temperature,
                plan_seed=derive_seed(self.seed, "plan", iteration),
                lengths=[trajectory.length for trajectory in usable],
                prompt_lengths=[len(trajectory.prompt_ids) for trajectory in usable],
                loss_tokens=[trajectory.num_loss_tokens for trajectory in usable],
                rewards=[float(trajectory.reward or 0.0) for trajectory in usable],
                group_ids=group_numbers,
                # A branch has a prompt of its own, and shares it with none.
                prompt_groups=_dense_numbers(prompts),
                greedy_rewards=[greedy_rewards[t.group_id] for t in usable] if greedy_baseline else None,
                # Of everything that was sampled: groups left out would hide what the policy can do.
                metrics={**rollout_metrics(sampled.everything, seconds), **sampled.metrics},
            ),
            sequences=usable,
        )

    def _requests(
        self, iteration: int, rows: Sequence[Prompt], first_number: int, samples: range
    ) -> list[TrajectoryRequest]:
        return [
            TrajectoryRequest(
                prompt=row,
                group_id=f"{iteration}:{number}:{row.row_id}",
                sample_index=sample,
                # The position within the iteration counts too: a small dataset may hold a row twice in one iteration.
                seed=derive_seed(self.seed, "train", iteration, number, row.row_id, sample),
            )
            for number, row in enumerate(rows, start=first_number)
            for sample in samples
        ]

    def evaluate(self, rows: Sequence[Prompt], sampling: SamplingParams, *, samples_per_row: int) -> list[Trajectory]:
        """Roll out every row ``samples_per_row`` times with seeds that are the same in every validation."""
        requests = [
            TrajectoryRequest(
                prompt=row,
                group_id=f"val:{row.row_id}",
                sample_index=sample,
                seed=derive_seed(self.seed, "val", row.row_id, sample),
            )
            for row in rows
            for sample in range(samples_per_row)
        ]
        return self._generate("validation", requests, sampling)

    def _generate(self, phase: str, requests: list[TrajectoryRequest], sampling: SamplingParams) -> list[Trajectory]:
        self.phase.start(phase, total=len(requests))
        trajectories: list[Trajectory] = self.runtime.loop.run(
            self.agents.generate(requests, replace(sampling), on_finished=self._count),
            timeout_s=self.timeout_s,
            what=f"{phase} of {len(requests)} trajectories",
        )
        for trajectory in trajectories:
            trajectory.check()
        return trajectories

    def _generate_both(
        self,
        requests: list[TrajectoryRequest],
        sampling: SamplingParams,
        greedy_requests: list[TrajectoryRequest],
        greedy: SamplingParams,
    ) -> tuple[list[Trajectory], list[Trajectory]]:
        """Roll out sampled and greedy trajectories at the same time: the engine batches them together."""
        self.phase.start("rollout", total=len(requests) + len(greedy_requests))

        async def both() -> tuple[list[Trajectory], list[Trajectory]]:
            return await asyncio.gather(
                self.agents.generate(requests, replace(sampling), on_finished=self._count),
                self.agents.generate(greedy_requests, greedy, on_finished=self._count),
            )

        what = f"rollout of {len(requests)} sampled and {len(greedy_requests)} greedy trajectories"
        one, other = self.runtime.loop.run(both(), timeout_s=self.timeout_s, what=what)
        for trajectory in [*one, *other]:
            trajectory.check()
        return one, other

    def _count(self, trajectory: Trajectory) -> None:
        self.phase.advance(1, len(trajectory.response_ids))


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**31) from a run's seed and whatever names the use; the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def _greedy(sampling: SamplingParams) -> SamplingParams:
    """The same limits, without chance."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)


def _reward_or_nan(trajectory: Trajectory) -> float:
    return math.nan if trajectory.has_failed or trajectory.reward is None else trajectory.reward


def _dense_numbers(names: Sequence[Hashable]) -> list[int]:
    """A number per name, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]
