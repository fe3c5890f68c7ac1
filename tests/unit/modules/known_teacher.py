"""A teacher whose network is at hand: what a served one answers, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lit_rl.experience.batch import Experience


class KnownTeacher:
    """Stands in for `TeacherScores`."""

    def __init__(self, network: Any, top_k: int) -> None:
        self.network = network
        self.top_k = top_k

    def check(self, policy_name: str, data: Any) -> None: ...

    def start(self, data: Any, *, gpu: bool) -> None: ...

    def forget(self) -> None: ...

    @contextmanager
    def requested(self, experience: Experience) -> Iterator[None]:
        yield

    def store(self, experience: Experience) -> float:
        columns: dict[str, list[torch.Tensor]] = {
            "teacher_logprobs": [], "teacher_top_ids": [], "teacher_top_logprobs": []
        }  # fmt: skip
        for trajectory in experience.trajectories:
            table = response_table(self.network, trajectory).detach()
            ids = torch.tensor(trajectory.response_ids, dtype=torch.int64)
            best = table.topk(self.top_k)
            columns["teacher_logprobs"].append(table.gather(-1, ids[:, None])[:, 0].float())
            columns["teacher_top_ids"].append(best.indices)
            columns["teacher_top_logprobs"].append(best.values.float())
        experience.columns |= columns
        return 0.0


def response_table(network: Any, trajectory: Any) -> torch.Tensor:
    """``[T, V]`` log-probs at the places of the response tokens, by a plain forward pass over one sequence."""
    ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
    first = len(trajectory.prompt_ids)
    return network(ids).logits[0, first - 1 : ids.shape[1] - 1].log_softmax(-1)
