"""The records that travel between the parts of lit_rl: prompts in, trajectories out.

Plain dataclasses on CPU, without torch: agent loops, tools, rewards and replicas exchange these, and only the
experience package turns them into tensors. Token ids sampled by the engine are kept for good; text is never re-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, Any]
"""One chat message: ``{"role": ..., "content": ...}`` and whatever else the chat template reads."""

StopReason = Literal["stop", "length", "abort"]
"""Why the engine ended a generation: an end token or stop string, the token limit, or an abort."""


@dataclass(kw_only=True)
class Prompt:
    """One row of a dataset, validated, as it is handed to an agent loop.

    Attributes:
        row_id: Stable identity of the row over epochs and restarts.
        messages: The conversation so far, in chat format.
        data_source: Chooses the scorer and groups validation metrics.
        ground_truth: What the reward function compares with; any plain value.
        ability: Informational.
        extra_info: The row's ``extra_info`` column.
        agent_name: Agent loop of this row; ``None`` takes the configured one.
        prompt_ids: The rendered prompt, where the dataset has measured it already.
    """

    row_id: str
    messages: list[Message]
    data_source: str
    ground_truth: Any = None
    ability: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str | None = None
    prompt_ids: list[int] | None = None


@dataclass(kw_only=True)
class SamplingParams:
    """How one response is sampled.

    Attributes:
        temperature: 0 is greedy. The trainer divides its logits by the same number.
        top_p: Nucleus mass in (0, 1].
        top_k: Candidates kept; -1 keeps all.
        max_tokens: Most tokens to sample, over all turns of a trajectory.
        stop: Strings that end the generation.
        stop_token_ids: Further end tokens, beside the model's own.
        ignore_eos: Keep sampling after an end token (benchmarks).
        seed: Per-request seed; ``None`` leaves it to the engine.
        repetition_penalty: 1.0 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    seed: int | None = None
    repetition_penalty: float = 1.0


@dataclass(kw_only=True)
class TokenOutput:
    """What a replica returns for one request.

    Attributes:
        token_ids: Sampled ids, the end token included.
        logprobs: One per sampled id, in nats, from the distribution that was sampled from (after temperature).
        stop_reason: See `StopReason`.
        policy_versions: Weight version that sampled each id.
        num_preempted: Times the engine preempted the request.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_versions: list[int]
    num_preempted: int = 0


@dataclass(kw_only=True)
class ScoreOutput:
    """What a replica's weights say about given tokens.

    Attributes:
        logprobs: One per scored token, in nats.
        top_ids: Per scored token, the ids of the most likely tokens at its place, best first; empty unless asked for.
        top_logprobs: Their log-probs, in nats.
        policy_version: Weight version that scored.
    """

    logprobs: list[float]
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    policy_version: int


@dataclass(kw_only=True)
class Trajectory:
    """One conversation as a flat token sequence, with what learning needs to know about it.

    The four per-token lists have one entry per id in ``response_ids``: everything after the prompt, sampled tokens and
    tool or user tokens alike.

    Attributes:
        row_id: Row of the dataset.
        group_id: Trajectories of one prompt in one iteration share it.
        sample_index: Position within the group, from 0.
        data_source: Copied from the row.
        prompt_ids: Rendered prompt.
        response_ids: Everything after the prompt.
        loss_mask: 1 where the policy sampled the token, else 0.
        rollout_logprobs: The engine's log-probs in nats; 0.0 where ``loss_mask`` is 0.
        policy_versions: Weight version that sampled each token; -1 where ``loss_mask`` is 0.
        reward: Sum the policy is trained on; ``None`` while unscored or when scoring failed.
        reward_parts: Named numbers beside the reward (accuracy, format, ...). Keys may differ between trajectories.
        reward_notes: What the reward function returned beside numbers, as text by name; for logs.
        turn_rewards: What each turn of the policy earned from its tools, reward units, as a part of ``reward``; the
            rest of ``reward`` belongs to the last turn. Empty where tools are not part of it.
        stop_reason: How the last generation ended.
        num_turns: Messages after the prompt, the policy's and the environment's, plus the prompt itself.
        error: Traceback or message when user code failed; such a trajectory is left out of loss and statistics.
        seed: Seed of its sampling, where one was set.
        text: Decoded policy tokens (``loss_mask`` 1), for scorers and logs.
        messages: The conversation after the prompt, where the agent loop keeps it.
        media: Images and videos of tools, in order of the calls, under ``image`` and ``video``. The policy has not read
            them: it reads text.
        metrics: Times in seconds and counters of this trajectory.
        branches: Further sequences of the same sample, where its history was edited or forked; trained with its reward.
    """

    row_id: str
    group_id: str
    sample_index: int = 0
    data_source: str = ""
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    rollout_logprobs: list[float]
    policy_versions: list[int]
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_notes: dict[str, str] = field(default_factory=dict)
    turn_rewards: list[float] = field(default_factory=list)
    stop_reason: StopReason = "stop"
    num_turns: int = 2
    error: str | None = None
    seed: int | None = None
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    media: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    branches: list[Trajectory] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens in prompt and response together."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens the policy sampled."""
        return sum(self.loss_mask)

    @property
    def version_range(self) -> tuple[int | None, int | None]:
        """Oldest and newest weights that sampled one of its tokens; twice ``None`` where it has none."""
        versions = [version for version in self.policy_versions if version >= 0]
        return min(versions, default=None), max(versions, default=None)

    @property
    def is_truncated(self) -> bool:
        """Whether the last generation ran into its token limit."""
        return self.stop_reason == "length"

    @property
    def has_failed(self) -> bool:
        """Whether it is left out of loss and statistics."""
        return self.error is not None or self.reward is None

    def check(self) -> None:
        """Raise ``ValueError`` unless the four per-token lists agree in length."""
        lengths = {
            "response_ids": len(self.response_ids),
            "loss_mask": len(self.loss_mask),
            "rollout_logprobs": len(self.rollout_logprobs),
            "policy_versions": len(self.policy_versions),
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Trajectory of row {self.row_id}: per-token lists differ in length: {lengths}.")
