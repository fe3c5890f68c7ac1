from __future__ import annotations

import lightning as L
import pytest

from lit_rl import RolloutDataModule
from lit_rl.data import Arithmetic
from lit_rl.types import Prompt, SamplingParams

ROWS = [
    Prompt(
        row_id="1", messages=[{"role": "user", "content": "What is 1 + 1?"}], data_source="arithmetic", ground_truth="2"
    )
]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"group_size": 0}, r"data\.group_size=0 must be at least 1"),
        ({"max_response_tokens": 0}, r"data\.max_response_tokens=0 must be at least 1"),
        ({"max_prompt_tokens": -1}, r"data\.max_prompt_tokens=-1 must be at least 1"),
        ({"max_tokens_per_micro_batch": 0}, r"data\.max_tokens_per_micro_batch=0 must be at least 1"),
        ({"micro_batch_size": 0}, r"data\.micro_batch_size=0 must be at least 1"),
        ({"val_samples_per_row": 0}, r"data\.val_samples_per_row=0 must be at least 1"),
        ({"rollout_timeout_s": float("nan")}, r"data\.rollout_timeout_s=nan must be above 0"),
        ({"sampling": SamplingParams(top_p=2.0)}, r"data\.sampling\.top_p=2\.0 must be in"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, r"data\.sampling\.temperature=nan"),
        ({"sampling": SamplingParams(temperature=0.0)}, r"data\.sampling\.temperature=0\.0 must be above 0"),
        ({"val_sampling": SamplingParams(repetition_penalty=0.0)}, r"data\.val_sampling\.repetition_penalty=0\.0"),
        ({"backend": "mpi"}, r"data\.backend='mpi' must be"),
    ],
)
def test_an_option_out_of_range_is_named_before_anything_starts(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        RolloutDataModule("no/such/model", Arithmetic(num_rows=2, max_operand=9), **options)


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_without_rows_is_refused_before_an_engine_starts(stage) -> None:
    data = RolloutDataModule("bundled/tiny-random", ROWS, backend="inline")

    with pytest.raises(ValueError, match="has no rows: set data"):
        data.setup(stage)


def test_responses_longer_than_the_model_are_refused_before_an_engine_starts() -> None:
    data = RolloutDataModule("bundled/tiny-random", ROWS, backend="inline", max_response_tokens=100_000)

    with pytest.raises(ValueError, match=r"data\.max_response_tokens=100000 need a model of .* has 8192"):
        data.setup("fit")


def test_an_unsupported_strategy_is_refused_before_an_engine_starts() -> None:
    data = RolloutDataModule("bundled/tiny-random", ROWS, backend="inline")
    data.trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_spawn", logger=False, enable_progress_bar=False
    )

    with pytest.raises(ValueError, match="starts its ranks with 'spawn'.*trainer.strategy=ddp"):
        data.setup("fit")
