"""Take lit_update.py's optimizer steps with TRL's GRPOTrainer, on the same answers, and compare the weights.

Usage: PYTHONPATH=. python bench/trl_parity/trl_update.py --model FOLDER --out /tmp/trl_update
Runs in TRL's environment after lit_update.py. Prints a table: how far each step has moved the weights, and how far the
two ends are apart relative to that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOTrainer
from trl_grpo import settings

PROMPTS, GROUP_SIZE = 4, 8


class CompareSteps(TrainerCallback):
    """Prints a line of the table after every step."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.start = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        print("| step | weights moved by | ends apart by | relative | cosine of the moves |")
        print("| --- | --- | --- | --- | --- |")

    @torch.no_grad()
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Against the file of the same step."""
        theirs = load_file(self.folder / f"lit_rl_step{state.global_step}.safetensors")
        moved = apart = product = own_moved = 0.0
        for name, tensor in self.model.named_parameters():
            own, other = (tensor - self.start[name]).double(), (theirs[name] - self.start[name]).double()
            moved += float(other.square().sum())
            own_moved += float(own.square().sum())
            apart += float((own - other).square().sum())
            product += float((own * other).sum())
        cosine = product / (moved * own_moved) ** 0.5
        cells = f"{moved**0.5:.3e} | {apart**0.5:.3e} | {(apart / moved) ** 0.5:.1e} | {cosine:.8f}"
        print(f"| {state.global_step} | {cells} |", flush=True)


def main() -> None:
    """Train on the recorded answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder that export_rows.py prints.")
    parser.add_argument("--out", type=Path, required=True, help="Folder that lit_update.py wrote.")
    options = parser.parse_args()
    answers = json.loads((options.out / "answers.json").read_text())
    # TRL asks for a whole step's answers at once, in the order of the rows.
    remaining = iter(answers)

    def recorded(prompts: list[str], trainer: Any) -> dict[str, Any]:
        taken = [next(remaining) for _ in prompts]
        assert [answer["prompt"] for answer in taken] == prompts
        return {
            "prompt_ids": [answer["prompt_ids"] for answer in taken],
            "completion_ids": [answer["completion_ids"] for answer in taken],
            "logprobs": None,
            "recorded_reward": [answer["reward"] for answer in taken],
        }

    def reward(completions: list[str], recorded_reward: list[float], **_: Any) -> list[float]:
        return list(recorded_reward)

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = [{"prompt": answer["prompt"]} for answer in answers[::GROUP_SIZE]]
    steps = len(rows) // PROMPTS
    args = settings(
        options.out / "trainer", seed=0, iterations=steps, bf16=False, prompts=PROMPTS, group_size=GROUP_SIZE,
        adam_epsilon=1e-3,
    )  # fmt: skip
    args.save_strategy = "no"
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[CompareSteps(model, options.out)],
        rollout_func=recorded,
    )
    trainer.train()


if __name__ == "__main__":
    main()
