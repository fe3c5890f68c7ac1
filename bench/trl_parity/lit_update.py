"""Take optimizer steps with lit_rl on recorded answers, for trl_update.py to take the same ones with TRL.

Usage: python bench/trl_parity/lit_update.py --rows /tmp/trl_rows --out /tmp/trl_update
Runs in lit_rl's environment. Samples answers of the first policy to the first training prompts (4 x 8 per step), scores
them, takes one step on each step's answers in float32 and writes ``answers.json`` and, after every step,
``lit_rl_step<n>.safetensors``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import save_file

from lit_rl.experience.batch import Experience
from lit_rl.experience.loader import ExperienceLoader
from lit_rl.experience.plan import plan_iteration
from lit_rl.models.loading import load_causal_lm, load_tokenizer
from lit_rl.modules import GRPO
from lit_rl.rewards.arithmetic import compute_score
from lit_rl.types import Trajectory

MODEL = "bundled/smollm2-135m"
PROMPTS, GROUP_SIZE, MAX_NEW_TOKENS = 4, 8, 16
ADAM_EPS = 1e-3
"""Far above the usual 1e-8, where AdamW's first step is the sign of the gradient, and rounding decides some signs."""


@torch.no_grad()
def sample(network: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to each prompt, a group after the other, with their rewards."""
    answers = []
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]]).repeat(GROUP_SIZE, 1)
        output = network.generate(ids, do_sample=True, temperature=0.8, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
        for sequence in output[:, ids.shape[1] :].tolist():
            end = sequence.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in sequence else len(sequence)
            text = tokenizer.decode(sequence[:end], skip_special_tokens=True)
            reward = compute_score(text, row["ground_truth"])["score"]
            answers.append({**row, "completion_ids": sequence[:end], "reward": reward})
    return answers


def experience_of(answers: list[dict[str, Any]], iteration: int) -> Experience:
    """One step's experience, as the collector makes it."""
    trajectories = [
        Trajectory(
            row_id=str(index // GROUP_SIZE),
            group_id=str(index // GROUP_SIZE),
            prompt_ids=answer["prompt_ids"],
            response_ids=answer["completion_ids"],
            loss_mask=[1] * len(answer["completion_ids"]),
            rollout_logprobs=[-1.0] * len(answer["completion_ids"]),
            policy_versions=[0] * len(answer["completion_ids"]),
            reward=answer["reward"],
        )
        for index, answer in enumerate(answers)
    ]
    groups = [index // GROUP_SIZE for index in range(len(answers))]
    tokens = [trajectory.num_loss_tokens for trajectory in trajectories]
    plan = plan_iteration(
        [trajectory.length for trajectory in trajectories],
        1,
        1,
        1,
        1024,
        0,
        loss_tokens=tokens,
        prompt_lengths=[len(trajectory.prompt_ids) for trajectory in trajectories],
        group_ids=groups,
        share_prompts=True,
    )
    return Experience(
        iteration=iteration,
        temperature=0.8,
        plan=plan,
        trajectories=trajectories,
        indices=range(len(trajectories)),
        rewards=torch.tensor([trajectory.reward for trajectory in trajectories]),
        group_ids=torch.tensor(groups),
        loss_tokens=torch.tensor(tokens),
    )


class SaveSteps(L.Callback):
    """Writes the actor's weights after every iteration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """One iteration is one step here."""
        weights = {name: tensor.detach().clone() for name, tensor in pl_module.actor.network.named_parameters()}
        save_file(weights, self.folder / f"lit_rl_step{trainer.current_epoch + 1}.safetensors")


def main() -> None:
    """Sample, train, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="Folder that export_rows.py wrote.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    lines = (options.rows / "train_seed1.jsonl").read_text().splitlines()[: PROMPTS * options.steps]
    answers = sample(load_causal_lm(MODEL), load_tokenizer(MODEL), [json.loads(line) for line in lines])
    (options.out / "answers.json").write_text(json.dumps(answers))
    per_step = PROMPTS * GROUP_SIZE
    experiences = iter(
        [experience_of(answers[step * per_step : (step + 1) * per_step], step) for step in range(options.steps)]
    )
    module = GRPO(MODEL, actor_lr=2e-5, adam_eps=ADAM_EPS)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SaveSteps(options.out)],
    )
    trainer.fit(module, train_dataloaders=ExperienceLoader(lambda: next(experiences), 1, 1))


if __name__ == "__main__":
    main()
