"""Train with TRL's GRPOTrainer what ``make quickstart`` trains with lit_rl: same weights, prompts, reward and settings.

Usage: PYTHONPATH=. python bench/trl_parity/trl_grpo.py --model FOLDER --rows /tmp/trl_rows --out runs/trl --seed 1
Runs in an environment of its own (requirements.txt here); of lit_rl only the reward function is imported, which knows
neither torch nor transformers. Writes ``trl_seed<seed>.csv`` (iteration, mean reward, seconds) and
``trl_seed<seed>.json`` (held-out accuracy with greedy answers before and after, settings, versions). With
``--stop_after_s`` it stops in time, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from lit_rl.rewards.arithmetic import compute_score

GROUP_SIZE, PROMPTS_PER_ITERATION, MAX_NEW_TOKENS = 16, 8, 16


def settings(
    folder: Path,
    *,
    seed: int,
    iterations: int,
    bf16: bool,
    prompts: int = PROMPTS_PER_ITERATION,
    group_size: int = GROUP_SIZE,
    adam_epsilon: float = 1e-8,
) -> GRPOConfig:
    """The options of configs/grpo_arithmetic.yaml and configs/base/trainer_cpu.yaml, in TRL's words."""
    rows_per_pass = min(32, prompts * group_size)
    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        use_cpu=True,
        bf16=bf16,  # autocast over float32 weights, as Lightning's bf16-mixed
        max_steps=iterations,
        # One optimizer step on 128 completions, in four passes whose gradients add up.
        per_device_train_batch_size=rows_per_pass,
        gradient_accumulation_steps=group_size * prompts // rows_per_pass,
        num_generations=group_size,
        max_completion_length=MAX_NEW_TOKENS,
        temperature=0.8,
        shuffle_dataset=False,  # the rows are in lit_rl's order already
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_epsilon=adam_epsilon,
        max_grad_norm=1.0,
        loss_type="dapo",  # mean over all tokens of the step: lit_rl's token-mean
        scale_rewards="group",
        epsilon=0.2,
        delta=3.0,
        beta=0.0,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )


def read_rows(path: Path, tokenizer: Any) -> list[dict[str, str]]:
    """Rows whose text gives this tokenizer the very ids that lit_rl prompts with."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        assert tokenizer(text=row["prompt"])["input_ids"] == row["prompt_ids"], row
    return [{"prompt": row["prompt"], "ground_truth": row["ground_truth"]} for row in rows]


def reward(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
    """lit_rl's reward of each completion."""
    return [compute_score(text, answer)["score"] for text, answer in zip(completions, ground_truth, strict=True)]


@torch.no_grad()
def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]], *, bf16: bool, batch_size: int = 64) -> float:
    """Share of the rows answered rightly with greedy decoding."""
    model.eval()
    right = 0.0
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        inputs = tokenizer([row["prompt"] for row in batch], return_tensors="pt", padding=True, padding_side="left")
        with torch.autocast("cpu", enabled=bf16):
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(reward(texts, [row["ground_truth"] for row in batch]))
    return right / len(rows)


class RewardCurve(TrainerCallback):
    """Appends each iteration's mean reward to a file as it comes, and stops in time."""

    def __init__(self, target: Path, stop_after_s: float) -> None:
        self.target = target
        self.stop_after_s = stop_after_s
        self.started = self.last = time.monotonic()
        if not target.exists():
            target.write_text("iteration,reward,seconds\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """TRL logs the means of a step after it."""
        if logs and "reward" in logs:
            with self.target.open("a", newline="") as file:
                now = time.monotonic()
                csv.writer(file).writerow([state.global_step - 1, logs["reward"], round(now - self.last, 1)])
                self.last = now

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop where the next iteration might not fit, after saving."""
        control.should_training_stop |= time.monotonic() - self.started > self.stop_after_s


def main() -> None:
    """Measure, train, measure again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="Folder that export_rows.py prints.")
    parser.add_argument("--rows", type=Path, required=True, help="Folder that export_rows.py wrote.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--fp32", action="store_true", help="Compute in float32 instead of under bfloat16 autocast.")
    parser.add_argument("--stop_after_s", type=float, default=float("inf"), help="Start no iteration after so long.")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    name, bf16 = f"trl_seed{options.seed}", not options.fp32
    target = options.out / f"{name}.json"
    result: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    train_rows = read_rows(options.rows / f"train_seed{options.seed}.jsonl", tokenizer)
    val_rows = read_rows(options.rows / "val.jsonl", tokenizer)
    if "before" not in result:
        result |= {"seed": options.seed, "iterations": options.iterations, "bf16": bf16, "num_held_out": len(val_rows)}
        result |= {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
        result["before"] = accuracy(model, tokenizer, val_rows, bf16=bf16)
        target.write_text(json.dumps(result, indent=1) + "\n")
    folder = options.out / name
    curve = RewardCurve(options.out / f"{name}.csv", options.stop_after_s)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings(folder, seed=options.seed, iterations=options.iterations, bf16=bf16),
        train_dataset=Dataset.from_list(train_rows),
        processing_class=tokenizer,
        callbacks=[curve],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    if trainer.state.global_step == options.iterations:
        result["after"] = accuracy(model, tokenizer, val_rows, bf16=bf16)
        target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"iteration {trainer.state.global_step} of {options.iterations}: {result}", flush=True)


if __name__ == "__main__":
    main()
