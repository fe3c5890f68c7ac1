import random

import lightning as L
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_rl.experience.batch import Experience
from lit_rl.experience.loader import ExperienceLoader
from lit_rl.experience.plan import plan_iteration
from lit_rl.types import Trajectory

VOCABULARY = 97


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory):
    """A random float32 Llama of some thousand parameters, saved as a checkpoint."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def make_trajectories():
    """Groups of random trajectories: uneven lengths, masked tool tokens, one empty response, rewards in quarters."""

    def make(num_groups=5, group_size=4, seed=0, rewards=None, with_tools=True):
        rng = random.Random(seed)
        trajectories = []
        for group in range(num_groups):
            prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(3, 9))]
            for sample in range(group_size):
                length = 0 if (group, sample) == (1, 2) else rng.randint(1, 14)
                mask = [0 if with_tools and 2 < column < 5 and column < length - 1 else 1 for column in range(length)]
                trajectories.append(
                    Trajectory(
                        row_id=str(group),
                        group_id=f"g{group}",
                        sample_index=sample,
                        prompt_ids=prompt,
                        response_ids=[rng.randrange(1, VOCABULARY) for _ in range(length)],
                        loss_mask=mask,
                        rollout_logprobs=[-4.0 * m for m in mask],
                        policy_versions=[0 if m else -1 for m in mask],
                        reward=rewards[len(trajectories)] if rewards else rng.randrange(5) / 4,
                    )  # fmt: skip
                )
        return trajectories

    return make


@pytest.fixture
def make_experience():
    """Experience of one rank from trajectories, as the collector makes it."""

    def make(trajectories, *, num_mini_batches=1, ppo_epochs=1, max_tokens=64, micro_batch_size=None,
             share_prompts=True, temperature=1.0, iteration=0, seed=0):  # fmt: skip
        numbers = {g: i for i, g in enumerate(dict.fromkeys(t.group_id for t in trajectories))}
        group_ids = [numbers[t.group_id] for t in trajectories]
        plan = plan_iteration(
            [t.length for t in trajectories], 1, num_mini_batches, ppo_epochs, max_tokens, seed,
            loss_tokens=[t.num_loss_tokens for t in trajectories],
            prompt_lengths=[len(t.prompt_ids) for t in trajectories],
            group_ids=group_ids, share_prompts=share_prompts, micro_batch_size=micro_batch_size,
        )  # fmt: skip
        return Experience(
            iteration=iteration, temperature=temperature, plan=plan, trajectories=trajectories,
            indices=range(len(trajectories)), rewards=torch.tensor([t.reward for t in trajectories]),
            group_ids=torch.tensor(group_ids), loss_tokens=torch.tensor([t.num_loss_tokens for t in trajectories]),
            share_prompts=share_prompts,
        )  # fmt: skip

    return make


@pytest.fixture
def fit():
    """Run a module on given experiences, one per iteration, and return the trainer."""

    def run(module, experiences, **trainer_options):
        torch.manual_seed(0)
        remaining = iter(experiences)
        first = experiences[0]
        loader = ExperienceLoader(
            lambda: next(remaining), len(first.plan.mini_batches), len(first.plan.mini_batches[0])
        )
        trainer = L.Trainer(
            accelerator="cpu", devices=1, max_epochs=len(experiences), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **trainer_options,
        )  # fmt: skip
        trainer.fit(module, train_dataloaders=loader)
        return trainer

    return run
