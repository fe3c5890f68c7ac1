"""Let lit_rl's GRPO learn the tests' contextual bandit, and leave the model for TRL to start from.

Usage: python bench/trl_parity/lit_bandit.py --out /tmp/trl_bandit
Runs in lit_rl's environment; trl_bandit.py does the same in TRL's. Writes the first weights, a tokenizer of one word
per token id, and ``lit_bandit_seed<n>.csv`` for each seed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from lit_rl.modules import GRPO

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/integration"))
ITERATIONS = 40


def main() -> None:
    """Save the start, train every seed."""
    from bandit import VOCABULARY, learn, save_tiny_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = save_tiny_model(options.out / "model")
    # The end is a word that the model cannot say: every answer has its full two tokens.
    words = {**{f"t{token}": token for token in range(VOCABULARY)}, "<end>": VOCABULARY}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    for seed in options.seeds:
        torch.manual_seed(seed)
        rewards = learn(GRPO(folder, actor_lr=1e-2), ITERATIONS, seed)
        lines = ["iteration,reward", *(f"{number},{reward}" for number, reward in enumerate(rewards))]
        (options.out / f"lit_bandit_seed{seed}.csv").write_text("\n".join(lines) + "\n")
        print(f"seed {seed}: {sum(rewards[-5:]) / 5:.3f}")


if __name__ == "__main__":
    main()
