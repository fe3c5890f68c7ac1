"""Compare an update of SmolLM2 through `Actor` with a bare transformers one, one thread: python bench/bench_update.py.

The reference workload: 8 prompts of 45 tokens with 4 responses of 96 tokens each, one group per micro-batch with its
prompt once, bfloat16, one AdamW step. Bare means the same packed rows with a mask through the model's own attention and
head, and AdamW on the bfloat16 weights themselves. CPU times, which other work on the machine does not distort.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from lit_rl.models import Actor, PackedSequences, load_causal_lm, pack

MODEL = "bundled/smollm2-135m"
NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, RESPONSE_TOKENS = 8, 4, 45, 96
REPEATS = 3


def run() -> dict[str, float]:
    """Return the ratio of median CPU times of a whole update: forwards, backwards and optimizer step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = [_pack_group() for _ in range(NUM_PROMPTS)]
    bare, actor = load_causal_lm(MODEL, dtype=torch.bfloat16), Actor(load_causal_lm(MODEL))
    actor.enable_bf16_working_copy()
    bare_optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-6, fused=True)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6, fused=True)

    def update_bare() -> None:
        for packed in batches:
            _bare_loss(bare, packed).backward()
        bare_optimizer.step()
        bare_optimizer.zero_grad()

    def update() -> None:
        for packed in batches:
            actor(packed).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    times: dict[Callable[[], None], list[float]] = {update_bare: [], update: []}
    for repeat in range(REPEATS + 1):
        for function, seconds in times.items():
            start = time.process_time()
            function()
            if repeat:  # the first round warms up
                seconds.append(time.process_time() - start)
    return {"update_vs_bare_ratio": statistics.median(times[update]) / statistics.median(times[update_bare])}


def _bare_loss(network: PreTrainedModel, packed: PackedSequences) -> torch.Tensor:
    visible = packed.attention_mask
    assert visible is not None
    mask = torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill(~visible, torch.finfo(torch.bfloat16).min)
    output = network.base_model(
        packed.input_ids, position_ids=packed.position_ids, attention_mask=mask, use_cache=False
    )
    logits = network.get_output_embeddings()(output.last_hidden_state[0, packed.source_index])
    return logits.float().log_softmax(-1).gather(-1, packed.target_ids[:, None]).sum()


def _pack_group() -> PackedSequences:
    prompt = torch.randint(1000, 40000, (PROMPT_TOKENS,)).tolist()
    responses = torch.randint(1000, 40000, (GROUP_SIZE, RESPONSE_TOKENS)).tolist()
    wanted = [[1] * RESPONSE_TOKENS] * GROUP_SIZE
    return pack([prompt] * GROUP_SIZE, responses, wanted, share_prompts=True)


if __name__ == "__main__":
    print(json.dumps(run()))
