"""Write what both sides train and are measured on: prompts in the order of lit_rl's run of a seed.

Usage: python bench/trl_parity/export_rows.py --seeds 1 2 3 --out /tmp/trl_rows
Runs in lit_rl's environment. Writes ``train_seed<seed>.jsonl`` (240 rows: 30 iterations of 8 prompts) and ``val.jsonl``
(every held-out sum), each row with the prompt's text, its token ids and the right answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from lit_rl.data import Arithmetic, ChatTemplate, PromptCursor
from lit_rl.models.loading import load_tokenizer, resolve_model
from lit_rl.types import Prompt

MODEL = "bundled/smollm2-135m"
ITERATIONS, PROMPTS_PER_ITERATION, MAX_OPERAND = 30, 8, 50
"""As in configs/grpo_arithmetic.yaml."""


def write(rows: Iterable[Prompt], template: ChatTemplate, target: Path) -> None:
    """One JSON object per row."""
    with target.open("w") as file:
        for row in rows:
            record = {
                "prompt": template.render_text(row.messages),
                "prompt_ids": template.render_prompt(row.messages),
                "ground_truth": row.ground_truth,
            }
            file.write(json.dumps(record) + "\n")


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    template = ChatTemplate(load_tokenizer(MODEL))
    train = Arithmetic(split="train", max_operand=MAX_OPERAND)
    val = Arithmetic(split="val", max_operand=MAX_OPERAND)
    for seed in options.seeds:
        cursor = PromptCursor.for_source(train, seed=seed)
        order = cursor.next(ITERATIONS * PROMPTS_PER_ITERATION)
        write((train[number] for number in order), template, options.out / f"train_seed{seed}.jsonl")
    write((val[number] for number in range(len(val))), template, options.out / "val.jsonl")
    print(f"model: {resolve_model(MODEL)}")


if __name__ == "__main__":
    main()
