"""Write conversations that solve word problems with the calculator: one expression, its value, the answer.

Run: python examples/calculator/demonstrations.py --num 256 --out_path data/calculator/demonstrations.jsonl

The problems are ``leg_counting`` of reasoning-gym ("how many legs are there if you have 13 ants and 8 tigers?"), of the
training split; the expression is made from the entry's own facts.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from lit_rl.data import ReasoningGym
from lit_rl.tools.calculator import Calculator
from lit_rl.types import Prompt

TASK = "leg_counting"
TASK_CONFIG = {"min_animals": 2, "max_animals": 4, "max_instances": 15}
SYSTEM = "Solve the problem with the tool calculator, then reply <answer>...</answer>."


def problems(split: str, num: int, seed: int = 0) -> ReasoningGym:
    """Return word problems; the configuration names the same ones."""
    return ReasoningGym(TASK, num, split, seed, TASK_CONFIG, SYSTEM)  # type: ignore[arg-type]


def expression(entry: dict[str, Any]) -> str:
    """Return the sum that answers an entry, such as ``13 * 6 + 8 * 4``."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    # In the order of the question, which the policy reads.
    return " + ".join(f"{count} * {ANIMALS[animal]}" for animal, count in entry["metadata"]["animals"].items())


def conversation(prompt: Prompt) -> dict[str, Any]:
    """Return one demonstration."""
    entry = prompt.extra_info["entry"]
    call = {"name": "calculator", "arguments": {"expression": expression(entry)}}
    answer = str(entry["answer"])
    assert re.fullmatch(r"\d+", answer)
    return {
        "messages": [
            *prompt.messages,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "id": "call00000", "function": call}],
            },
            {"role": "tool", "name": "calculator", "tool_call_id": "call00000", "content": answer},
            {"role": "assistant", "content": f"<answer>{answer}</answer>"},
        ],
        "tools": [Calculator().get_openai_tool_schema().to_dict()],
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1, help="another than the configuration's, which trains on seed 0")
    parser.add_argument("--out_path", type=Path, default=Path("data/calculator/demonstrations.jsonl"))
    options = parser.parse_args()
    rows = problems("train", options.num, options.seed)
    options.out_path.parent.mkdir(parents=True, exist_ok=True)
    with options.out_path.open("w") as file:
        file.writelines(json.dumps(conversation(rows[index])) + "\n" for index in range(len(rows)))
    print(f"{options.out_path}: {len(rows)} conversations")


if __name__ == "__main__":
    main()
