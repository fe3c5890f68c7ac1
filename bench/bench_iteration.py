"""One whole GRPO iteration of SmolLM2-135M against its floor, alternating in one run, every process on one core.

The work: 8 prompts x 4 samples, 96 new tokens each with end tokens ignored (3,072 generated tokens, about 4,500
trained), bfloat16, one optimizer step, no reference. The floor of an iteration is the engine alone generating as many
tokens for the same prompts, plus a bare transformers forward and backward of the very rows the iteration packed, and
AdamW on float32 masters.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

NUM_PROMPTS, GROUP_SIZE, NEW_TOKENS = 8, 4, 96
WARM_UP, MEASURED = 2, 5


def hash_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """A reward that differs between samples, whatever they say."""
    return hashlib.sha256(solution_str.encode()).digest()[0] / 255


def run() -> dict[str, float]:
    """Measure on one core and return the group's numbers."""
    core = sorted(os.sched_getaffinity(0))[0]
    os.sched_setaffinity(0, {core})  # inherited by every process that is started from here on
    import lightning as L
    import torch

    from lit_rl.callbacks import WeightSync
    from lit_rl.modules import GRPO

    torch.set_num_threads(1)
    probe = _probe_class()()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed",
        max_epochs=WARM_UP + MEASURED,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[WeightSync(), probe],
    )
    trainer.fit(GRPO("bundled/smollm2-135m", actor_lr=1e-6), datamodule=_data())
    return probe.results()


def _data() -> Any:
    from lit_rl import RolloutDataModule
    from lit_rl.agents import AgentSettings
    from lit_rl.rewards import RewardSettings
    from lit_rl.serving import ServingSettings
    from lit_rl.types import Prompt, SamplingParams

    questions = [
        f"What is {i} + {i + 3}? Explain each step of the addition in a full sentence, please." for i in range(8)
    ]
    rows = [
        Prompt(row_id=str(i), messages=[{"role": "user", "content": q}], data_source="bench")
        for i, q in enumerate(questions)
    ]
    return RolloutDataModule(
        model_name="bundled/smollm2-135m",
        train_data=rows,  # type: ignore[arg-type]
        prompts_per_iteration=NUM_PROMPTS,
        group_size=GROUP_SIZE,
        max_prompt_tokens=96,
        max_response_tokens=NEW_TOKENS,
        max_tokens_per_micro_batch=512,
        sampling=SamplingParams(ignore_eos=True),
        agents=AgentSettings(num_workers=1),
        rewards=RewardSettings(function=f"{os.path.abspath(__file__)}:hash_reward", num_workers=1),
        serving=ServingSettings(threads_per_replica=1),
        num_cpus=2,
    )


def _probe_class() -> type:
    import lightning as L

    class Probe(L.Callback):
        """Times each iteration, and after it the floor of the same work."""

        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []
            self.peak_rss_gb = 0.0
            self.bare: Any = None

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            self.started = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.experience = batch.experience

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            row = {"iteration_s": time.perf_counter() - self.started}
            logged = trainer.callback_metrics
            for key, name in {
                "iteration_rollout_s": "timing_s/gen",
                "iteration_update_s": "timing_s/update_actor",
                "sync_s": "timing_s/update_weights",
            }.items():
                row[key] = float(logged[name])
            row["iteration_scoring_s"] = float(logged.get("timing_s/old_log_prob", 0.0))
            if trainer.current_epoch < WARM_UP:
                self.peak_rss_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
                return
            row["floor_rollout_s"] = _engine_alone(trainer.datamodule, self.experience)
            if self.bare is None:
                self.bare = _bare_model()
            row["floor_update_s"] = _bare_update(self.bare, self.experience)
            self.rows.append(row)
            print(json.dumps({key: round(value, 3) for key, value in row.items()}), file=sys.stderr, flush=True)

        def results(self) -> dict[str, float]:
            """Medians over the measured iterations; the ratio is the median of the ratios of neighbours in time."""
            medians = {key: statistics.median(row[key] for row in self.rows) for key in self.rows[0]}
            ratios = [row["iteration_s"] / (row["floor_rollout_s"] + row["floor_update_s"]) for row in self.rows]
            return {
                **medians,
                "iteration_vs_floor_ratio": statistics.median(ratios),
                "trainer_peak_rss_gb": self.peak_rss_gb,
            }

    return Probe


def _engine_alone(data: Any, experience: Any) -> float:
    """Seconds in which the replica generates as many tokens for the same prompts, with nobody in between."""
    replica = data.servers.replicas.workers[0]

    async def generate() -> None:
        calls = [
            replica.call(
                "generate",
                t.prompt_ids,
                replace(data.sampling, seed=i),
                f"floor-{i}-{time.time()}",
                timeout_s=600,
            )
            for i, t in enumerate(experience.trajectories)
        ]
        outputs = await asyncio.gather(*calls)
        assert all(len(output.token_ids) == NEW_TOKENS for output in outputs)

    started = time.perf_counter()
    data.runtime.loop.run(generate(), timeout_s=900, what="the engine alone")
    return time.perf_counter() - started


def _bare_update(bare: tuple[Any, list[Any], Any], experience: Any) -> float:
    """Seconds of forward, backward and AdamW of the iteration's rows, written out with transformers and torch alone."""
    import torch

    model, masters, optimizer = bare
    rows = [
        micro_batch.packed
        for mini in experience.plan.mini_batches[0]
        for micro_batch in _micro_batches(experience, mini)
    ]
    inputs = [(row, _bare_mask(row)) for row in rows]
    total = sum(row.num_targets for row in rows)
    started = time.perf_counter()
    for row, mask in inputs:
        hidden = model.model(
            input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state[0]
        logits = model.lm_head(hidden[row.source_index]).float()
        logprobs = logits.log_softmax(-1).gather(-1, row.target_ids[:, None])[:, 0]
        (-logprobs.sum() / total).backward()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
            master.grad = None
    return time.perf_counter() - started


def _micro_batches(experience: Any, mini: Any) -> list[Any]:
    import torch

    from lit_rl.experience.batch import MicroBatch

    return [MicroBatch(experience, indices, torch.device("cpu")) for indices in mini.micro_batches[0]]


def _bare_model() -> tuple[Any, list[Any], Any]:
    import torch

    from lit_rl.models import load_causal_lm

    model = load_causal_lm("bundled/smollm2-135m", dtype=torch.bfloat16)
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    return model, masters, torch.optim.AdamW(masters, lr=1e-6, weight_decay=0.0, fused=True)


def _bare_mask(row: Any) -> Any:
    """The row's mask as transformers takes it: one [1, 1, L, L] matrix, or none."""
    import torch

    allowed = row.attention_mask
    if allowed is None:
        return None
    return torch.zeros(allowed.shape, dtype=torch.bfloat16).masked_fill(~allowed, torch.finfo(torch.bfloat16).min)


if __name__ == "__main__":
    print(json.dumps(run()))
