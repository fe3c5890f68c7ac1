"""What `smoke.sh` runs: see there. Each part prints a JSON object; a failing one does not stop the others."""

import argparse
import json
import os
import tempfile
import time
import traceback
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# Dense bf16 peak of the device in FLOP/s, where it is known (vendor data sheets).
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def half_billion(small):
    """A 0.5 B model of Qwen2.5's proportions, random weights; a tiny one for trying the script."""
    if small:
        return LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
                           tie_word_embeddings=True)  # fmt: skip
    return LlamaConfig(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                       num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=8192,
                       tie_word_embeddings=True)  # fmt: skip


def packed_batch(config, num_sequences, length, device, share_prompts=False):
    from lit_rl.models import pack

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, config.vocab_size, (length // 4,), generator=generator).tolist()] * num_sequences
    responses = [
        torch.randint(1, config.vocab_size, (length - length // 4,), generator=generator).tolist()
        for _ in range(num_sequences)
    ]
    masks = [[1] * len(response) for response in responses]
    return pack(prompts, responses, masks, share_prompts=share_prompts).to(device)


def update(small, device, chunk_size):
    """Forward, backward and AdamW of 8k packed tokens: tokens per second, share of peak, peak memory."""
    from lit_rl.models import Actor

    config = half_billion(small)
    with torch.device(device):
        network = LlamaForCausalLM(config)
    actor = Actor(network, chunk_size=chunk_size)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-6, fused=True)
    packed = packed_batch(config, 4, 64 if small else 2048, device)
    num_parameters = sum(p.numel() for p in actor.parameters())
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(2 if small else 8):
        started = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = -actor(packed).logprobs.sum() / packed.num_targets
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = sorted(times[1:])[len(times[1:]) // 2]
    result = {"parameters": num_parameters, "tokens_per_s": packed.num_tokens / seconds, "update_s": seconds}
    if device == "cuda":
        name = torch.cuda.get_device_name()
        peak = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
        result |= {"device": name, "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9}
        if peak is not None:
            result["share_of_peak"] = 6 * num_parameters * packed.num_tokens / seconds / peak
    return result


def chunked_logprobs(small, device):
    """Chunked against plain log-probs: largest difference, memory, time."""
    from lit_rl.models.token_logprobs import token_logprobs

    rows, hidden_size, vocabulary = (256, 64, 512) if small else (16_384, 896, 151_936)
    hidden = torch.randn(rows, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,), device=device)
    result = {}
    values = {}
    for name, compute in {
        "chunked": lambda: token_logprobs(hidden, weight, targets),
        "plain": lambda: (hidden @ weight.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0],
    }.items():
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        values[name] = compute()
        values[name].sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
            result[f"{name}_extra_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        result[f"{name}_s"] = time.perf_counter() - started
        hidden.grad = weight.grad = None
    result["largest_difference"] = float((values["chunked"] - values["plain"]).abs().max())
    return result


def fsdp2_on_one_device(small, device):
    """The actor sharded over a mesh of one: same log-probs as unsharded, one optimizer step."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lit_rl.models import Actor

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(device, (1,))
        with torch.device(device):
            actor = Actor(LlamaForCausalLM(half_billion(True)))
        packed = packed_batch(half_billion(True), 2, 64, device)
        plain = actor(packed).logprobs.detach()
        for layer in actor.network.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(actor, mesh=mesh)
        optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-4)
        sharded = actor(packed).logprobs
        difference = float((sharded.detach() - plain).abs().max())
        (-sharded.sum()).backward()
        optimizer.step()
        moved = float((actor(packed).logprobs.detach() - plain).abs().max())
        return {"largest_difference": difference, "moved_after_a_step": moved}
    finally:
        dist.destroy_process_group()


def whole_loop(device):
    """GRPO end to end: inline backend, transformers replica, a tiny model and a tokenizer made here."""
    import lightning as L

    from lit_rl import GRPO, RolloutDataModule
    from lit_rl.callbacks import WeightSync
    from lit_rl.rewards import RewardSettings
    from lit_rl.serving import ServingSettings
    from lit_rl.types import Prompt

    folder = tempfile.mkdtemp()
    make_checkpoint(Path(folder))
    rows = [Prompt(row_id=str(i), messages=[{"role": "user", "content": f"w{i} w{i + 1}"}], data_source="smoke")
            for i in range(4)]  # fmt: skip
    data = RolloutDataModule(
        folder, rows, prompts_per_iteration=2, group_size=4, max_prompt_tokens=32, max_response_tokens=8,
        rewards=RewardSettings(function=num_characters),
        serving=ServingSettings(replica="transformers", dtype="float32"), backend="inline",
    )  # fmt: skip
    trainer = L.Trainer(accelerator="gpu" if device == "cuda" else "cpu", devices=1, max_epochs=3, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                        callbacks=[WeightSync()])  # fmt: skip
    started = time.perf_counter()
    trainer.fit(GRPO(folder, actor_lr=1e-3), datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"seconds": time.perf_counter() - started, "iterations": trainer.current_epoch,
            "reward": metrics["critic/score/mean"],
            "logprob_gap": metrics.get("rollout_corr/logprob_gap_mean")}  # fmt: skip


def num_characters(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str))


def make_checkpoint(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<user>", "<assistant>", "<unk>", *(f"w{i}" for i in range(507))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = (
        "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    fast.save_pretrained(folder)
    config = half_billion(True)
    config.eos_token_id, config.pad_token_id = 1, 0
    LlamaForCausalLM(config).save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="Tiny sizes on a CPU.")
    options = parser.parse_args()
    device = "cpu" if options.small else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("No GPU here. Try the script itself with --small.")
    parts = {
        "update_chunked": lambda: update(options.small, device, 1024),
        "update_unchunked": lambda: update(options.small, device, 1 << 30),
        "logprobs": lambda: chunked_logprobs(options.small, device),
        "fsdp2": lambda: fsdp2_on_one_device(options.small, device),
        "loop": lambda: whole_loop(device),
    }
    failed = []
    for name, part in parts.items():
        try:
            print(json.dumps({name: part()}), flush=True)
        except Exception:
            failed.append(name)
            traceback.print_exc()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
