"""Let TRL's GRPOTrainer learn the contextual bandit that lit_bandit.py learns, from the same weights.

Usage: PYTHONPATH=. python bench/trl_parity/trl_bandit.py --out /tmp/trl_bandit
Runs in TRL's environment after lit_bandit.py. Writes ``trl_bandit_seed<n>.csv`` for each seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer
from trl_grpo import RewardCurve, settings

NUM_CONTEXTS, GROUP_SIZE, ANSWER_TOKENS, ITERATIONS = 4, 8, 2, 40


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Share of the answer's tokens that are the context modulo 4, as in the tests' bandit."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        context, tokens = int(prompt.split()[0][1:]), [int(word[1:]) for word in completion.split()]
        assert len(tokens) == ANSWER_TOKENS, completion
        scores.append(sum(token % NUM_CONTEXTS == context for token in tokens) / ANSWER_TOKENS)
    return scores


def main() -> None:
    """Train every seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.out / "model"
    rows = [{"prompt": f"t{context} t0"} for _ in range(ITERATIONS) for context in range(NUM_CONTEXTS)]
    for seed in options.seeds:
        args = settings(
            options.out / "trainer", seed=seed, iterations=ITERATIONS, bf16=False, prompts=NUM_CONTEXTS,
            group_size=GROUP_SIZE,
        )  # fmt: skip
        args.save_strategy, args.learning_rate, args.temperature = "no", 1e-2, 1.0
        args.max_completion_length = ANSWER_TOKENS
        target = options.out / f"trl_bandit_seed{seed}.csv"
        target.unlink(missing_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # Llama's default end is token 2, a word here.
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[RewardCurve(target, float("inf"))],
        )
        trainer.train()


if __name__ == "__main__":
    main()
