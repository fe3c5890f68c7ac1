"""Roll out one iteration: rows from the cursor, trajectories from the agent loops, experience for the loader.

Position in the flow: cursor -> **collector** -> agent-loop manager -> **collector** -> loader. It gates on the policy
version, derives every trajectory's seed, and leaves failed trajectories out. It computes nothing that needs a network.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from lit_rl.agents import AgentLoopManager, TrajectoryRequest
from lit_rl.cluster import Runtime
from lit_rl.experience.batch import Experience
from lit_rl.experience.plan import plan_iteration
from lit_rl.experience.progress import PhaseProgress
from lit_rl.metrics.rollout import rollout_metrics
from lit_rl.serving import LLMServerManager
from lit_rl.types import Prompt, SamplingParams, Trajectory


class Collector:
    """Turns rows into experience, iteration by iteration, and into scored trajectories for validation."""

    def __init__(
        self,
        *,
        runtime: Runtime,
        agents: AgentLoopManager,
        servers: LLMServerManager,
        phase: PhaseProgress,
        seed: int,
        timeout_s: float,
    ) -> None:
        """Keep the managers.

        Args:
            runtime: Whose event loop rollouts run on.
            agents: Runs conversations.
            servers: Knows which weights the replicas hold.
            phase: Where progress is told.
            seed: Root of all sampling seeds.
            timeout_s: Longest rollout in seconds.
        """
        self.runtime = runtime
        self.agents = agents
        self.servers = servers
        self.phase = phase
        self.seed = seed
        self.timeout_s = timeout_s
        self.last_trajectories: list[Trajectory] = []

    def collect(
        self,
        iteration: int,
        rows: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        group_size: int,
        num_mini_batches: int,
        ppo_epochs: int,
        max_tokens: int,
        micro_batch_size: int | None,
        share_prompts: bool,
    ) -> Experience:
        """Roll out ``group_size`` trajectories of each row and plan how they are learnt from.

        Raises:
            RuntimeError: If the replicas do not hold the weights of this iteration.
        """
        self.servers.require_version(iteration, iteration)
        requests = [
            TrajectoryRequest(
                prompt=row,
                group_id=f"{iteration}:{number}:{row.row_id}",
                sample_index=sample,
                # The position within the iteration counts too: a small dataset may hold a row twice in one iteration.
                seed=derive_seed(self.seed, "train", iteration, number, row.row_id, sample),
            )
            for number, row in enumerate(rows)
            for sample in range(group_size)
        ]
        started = time.perf_counter()
        trajectories = self._generate("rollout", requests, sampling)
        seconds = time.perf_counter() - started
        self.last_trajectories = trajectories
        usable = [trajectory for trajectory in trajectories if not trajectory.has_failed]
        group_numbers = _group_numbers(usable)
        plan = plan_iteration(
            [trajectory.length for trajectory in usable],
            1,
            num_mini_batches,
            ppo_epochs,
            max_tokens,
            derive_seed(self.seed, "plan", iteration),
            loss_tokens=[trajectory.num_loss_tokens for trajectory in usable],
            prompt_lengths=[len(trajectory.prompt_ids) for trajectory in usable],
            group_ids=group_numbers,
            share_prompts=share_prompts,
            micro_batch_size=micro_batch_size,
        )
        own = plan.rank_sequences[0]
        return Experience(
            iteration=iteration,
            temperature=sampling.temperature,
            plan=plan,
            trajectories=[usable[index] for index in own],
            indices=own,
            rewards=torch.tensor([trajectory.reward for trajectory in usable], dtype=torch.float32),
            group_ids=torch.tensor(group_numbers, dtype=torch.int64),
            loss_tokens=torch.tensor([trajectory.num_loss_tokens for trajectory in usable], dtype=torch.int64),
            share_prompts=share_prompts,
            metrics={**rollout_metrics(trajectories, seconds), **plan.metrics},
            phase=self.phase,
        )

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

        def count(trajectory: Trajectory) -> None:
            self.phase.advance(1, len(trajectory.response_ids))

        trajectories: list[Trajectory] = self.runtime.loop.run(
            self.agents.generate(requests, replace(sampling), on_finished=count),
            timeout_s=self.timeout_s,
            what=f"{phase} of {len(requests)} trajectories",
        )
        for trajectory in trajectories:
            trajectory.check()
        return trajectories


def derive_seed(*parts: object) -> int:
    """A seed in [0, 2**31) from a run's seed and whatever names the use; the same on every machine."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def _group_numbers(trajectories: Sequence[Trajectory]) -> list[int]:
    """A dense number per group, in order of first appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(trajectory.group_id, len(numbers)) for trajectory in trajectories]
