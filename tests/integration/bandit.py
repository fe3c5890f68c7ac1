"""A contextual bandit with answers of two tokens, for learning in seconds and without an engine.

The prompt is one of four contexts; an answer's reward is the share of its tokens that belong to the context (token
modulo 4), so chance earns 0.25. Answers are sampled from the module's own network, through transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.experience.batch import Experience
from lit_rl.experience.loader import ExperienceLoader
from lit_rl.experience.plan import plan_iteration
from lit_rl.modules import PolicyGradientModule
from lit_rl.types import Trajectory

NUM_CONTEXTS, VOCABULARY, ANSWER_TOKENS = 4, 16, 2
CHANCE = 1 / NUM_CONTEXTS


def save_tiny_model(folder: Path) -> str:
    """A one-layer Llama that knows nothing yet, the same every time."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Bandit:
    """Collects experience for a module; the mean reward of every iteration is in ``rewards``."""

    def __init__(self, module: PolicyGradientModule, seed: int, *, group_size: int, num_mini_batches: int) -> None:
        self.module = module
        self.generator = torch.Generator().manual_seed(seed)
        self.group_size = group_size
        self.num_mini_batches = num_mini_batches
        self.rewards: list[float] = []

    def loader(self) -> ExperienceLoader:
        """One iteration per pass."""
        return ExperienceLoader(self.collect, 1, self.num_mini_batches)

    def collect(self) -> Experience:
        """Answers to every context, and the rewards of greedy ones."""
        contexts = torch.arange(NUM_CONTEXTS).repeat_interleave(self.group_size)
        answers, logprobs = self._answer(contexts, greedy=False)
        rewards = score(contexts, answers)
        self.rewards.append(float(rewards.mean()))
        greedy_rewards = score(contexts, self._answer(contexts, greedy=True)[0])
        trajectories = [
            Trajectory(
                row_id=str(context), group_id=str(context), prompt_ids=[context, 0], response_ids=answer,
                loss_mask=[1] * ANSWER_TOKENS, rollout_logprobs=own_logprobs, policy_versions=[0] * ANSWER_TOKENS,
                reward=reward, reward_parts={"acc": reward, "complete": float(reward == 1.0)},
            )
            for context, answer, own_logprobs, reward in zip(
                contexts.tolist(), answers.tolist(), logprobs.tolist(), rewards.tolist(), strict=True
            )
        ]  # fmt: skip
        lengths = [trajectory.length for trajectory in trajectories]
        plan = plan_iteration(
            lengths, 1, self.num_mini_batches, 1, 1000, len(self.rewards), prompt_lengths=[2] * len(lengths),
            group_ids=contexts.tolist(), share_prompts=True,
        )  # fmt: skip
        return Experience(
            iteration=len(self.rewards) - 1, temperature=1.0, plan=plan, trajectories=trajectories,
            indices=range(len(trajectories)), rewards=rewards, group_ids=contexts,
            loss_tokens=torch.full((len(trajectories),), ANSWER_TOKENS), greedy_rewards=greedy_rewards,
        )  # fmt: skip

    @torch.no_grad()
    def _answer(self, contexts: torch.Tensor, *, greedy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """``[N, 2]`` tokens and their log-probs."""
        assert self.module.actor is not None
        ids = torch.stack([contexts, torch.zeros_like(contexts)], 1)
        logprobs = []
        for _ in range(ANSWER_TOKENS):
            table = self.module.actor.network(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
            drawn = torch.multinomial(table.exp(), 1, generator=self.generator)
            token = table.argmax(-1, keepdim=True) if greedy else drawn
            logprobs.append(table.gather(1, token))
            ids = torch.cat([ids, token], 1)
        return ids[:, 2:], torch.cat(logprobs, 1)


def score(contexts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Share of the tokens that belong to the context."""
    return (answers % NUM_CONTEXTS == contexts[:, None]).float().mean(1)


def learn(
    module: PolicyGradientModule, iterations: int, seed: int, *, group_size: int = 8, num_mini_batches: int = 1
) -> list[float]:
    """Train, and return the mean reward of each iteration."""
    bandit = Bandit(module, seed, group_size=group_size, num_mini_batches=num_mini_batches)
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=iterations, enable_model_summary=False, **options)
    trainer.fit(module, train_dataloaders=bandit.loader())
    return bandit.rewards
