"""A replica of a discriminative reward model: a sequence classifier on Hugging Face transformers.

Position in the flow: reward worker -> `RewardModel` -> client -> **classifier replica**. It reads whole conversations
as token ids and returns the classifier's outputs. Requests that wait while a batch runs form the next batch. Its
weights are never updated.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lit_rl.serving.replica import INITIAL_VERSION
from lit_rl.serving.settings import ServingSettings

_GATHER_S = 0.002  # lets requests that were sent together arrive together

_LOADING = threading.Lock()
"""Inline, several replicas load in one process, and transformers (5) then leaves parameters on the meta device."""


class TransformersClassifierReplica:
    """``AutoModelForSequenceClassification`` as a replica."""

    def __init__(self, model: str, settings: ServingSettings, max_model_len: int, rank: int, gpu: bool) -> None:
        """Keep the settings; `start` loads the model. Arguments as in `VLLMReplica`."""
        self.model_name = model
        self.settings = settings
        self.max_model_len = max_model_len
        self.rank = rank
        self.gpu = gpu
        self._waiting: list[tuple[list[int], asyncio.Future[list[float]]]] = []
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="classifier-replica")

    async def start(self) -> None:
        """Load the model and start the batching loop."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        self._loop_task = asyncio.create_task(self._batch_forever(), name="classifier-replica")

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification

        with _LOADING:
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                self.model_name, dtype=getattr(torch, self.settings.dtype), output_loading_info=True
            )
        # transformers only warns: every score would be noise.
        if missing := sorted(loading["missing_keys"]):
            raise ValueError(
                f"{self.model_name} is no trained sequence classifier: its files lack {', '.join(missing[:5])}. Give a "
                "reward model, or kind: generative for a language model that judges."
            )
        self.model: Any = model.eval()
        if self.gpu:
            self.model.to("cuda")

    async def classify(self, token_ids: list[int]) -> list[float]:
        """Return the classifier's outputs for one conversation, before any activation.

        Args:
            token_ids: The whole conversation.

        Raises:
            ValueError: If it is empty or longer than the replica takes.
        """
        if not 1 <= len(token_ids) <= self.max_model_len:
            raise ValueError(
                f"The conversation has {len(token_ids)} tokens, the reward model reads 1 to {self.max_model_len}. "
                "Raise serving.max_model_len of the model in data.rewards.models."
            )
        answer: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, answer))
        self._wake.set()
        return await answer

    async def _batch_forever(self) -> None:
        """Run batch after batch of whatever is waiting; a failing batch fails its own requests only."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            self._waiting = [request for request in self._waiting if not request[1].done()]  # callers that gave up
            batch = self._waiting[: self.settings.max_num_seqs]
            del self._waiting[: len(batch)]
            if not self._waiting:
                self._wake.clear()
            if not batch:
                continue
            try:
                run = asyncio.get_running_loop().run_in_executor(self._thread, self._run, [ids for ids, _ in batch])
                outputs: list[Any] = await run
            except Exception as error:
                outputs = [error] * len(batch)
            for (_, answer), output in zip(batch, outputs, strict=True):
                if answer.done():
                    continue
                if isinstance(output, Exception):
                    answer.set_exception(output)
                else:
                    answer.set_result(output)

    def _run(self, batch: list[list[int]]) -> list[list[float]]:
        """Outputs of each conversation: ``[number of labels]`` floats."""
        import torch

        # One at a time: classifiers of transformers pool at the last token by looking for the padding id, and disagree
        # about where it may stand; on a CPU batching gains nothing for long conversations.
        outputs = []
        with torch.inference_mode():
            for ids in batch:
                logits = self.model(input_ids=torch.tensor([ids], device=self.model.device)).logits
                outputs.append([float(value) for value in logits[0]])
        return outputs

    async def health(self) -> dict[str, Any]:
        """Which version is served."""
        if self._loop_task is None or self._loop_task.done():
            raise RuntimeError(f"Reward model replica {self.rank}: the batching loop has ended.")
        return {"version": INITIAL_VERSION, "engine_pids": []}

    async def close(self) -> None:
        """Stop the batching loop."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
        self._thread.shutdown(wait=False, cancel_futures=True)
