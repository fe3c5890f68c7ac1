"""A replica on Hugging Face transformers: for models that vLLM lacks, and for tests that need no engine start.

Requests that wait while a batch runs form the next batch (left-padded, with a key-value cache). Each request draws from
a generator of its own seed, so what it samples does not depend on who shares its batch, up to floating-point noise. It
is simple, not fast.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lit_rl.serving.replica import INITIAL_VERSION, WeightReport, check_score_request
from lit_rl.serving.settings import ServingSettings
from lit_rl.types import SamplingParams, ScoreOutput, StopReason, TokenOutput

_LOADING = threading.Lock()
"""Inline, several replicas load in one process, and transformers (5) then leaves parameters on the meta device."""


@dataclass(kw_only=True)
class _Request:
    """One waiting or running request and where its answer goes."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    limit: int
    answer: asyncio.Future[TokenOutput]
    generator: Any
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None


class TransformersReplica:
    """Hugging Face generation behind the `Replica` protocol."""

    def __init__(self, model: str, settings: ServingSettings, max_model_len: int, rank: int, gpu: bool) -> None:
        """Keep the settings; `start` loads the model. Arguments as in `VLLMReplica`."""
        self.model_name = model
        self.settings = settings
        self.max_model_len = max_model_len
        self.rank = rank
        self.gpu = gpu
        self.version = INITIAL_VERSION
        self._waiting: list[_Request] = []
        self._running: dict[str, _Request] = {}
        self._wake = asyncio.Event()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._loop_task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers-replica")
        self._received: dict[str, int] = {}
        self._num_scoring = 0

    async def start(self) -> None:
        """Load model and tokenizer and start the batching loop."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)
        self._loop_task = asyncio.create_task(self._batch_forever(), name="transformers-replica")

    def _load(self) -> None:
        import torch

        from lit_rl.models import load_causal_lm, load_tokenizer

        self.tokenizer: Any = load_tokenizer(self.model_name)
        with _LOADING:
            self.model: Any = load_causal_lm(self.model_name, dtype=getattr(torch, self.settings.dtype))
        if self.gpu:
            self.model.to("cuda")
        ends = self.model.generation_config.eos_token_id
        self.end_ids = set(ends if isinstance(ends, list) else [ends]) - {None}

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, request_id: str) -> TokenOutput:
        """Sample one response; see `Replica.generate`."""
        import torch

        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"The prompt has {len(prompt_ids)} tokens, but data.serving.max_model_len={self.max_model_len} leaves "
                "no room for a response. Raise it, or lower data.max_prompt_tokens so that such rows are filtered out."
            )
        generator = torch.Generator()
        generator.seed() if sampling.seed is None else generator.manual_seed(sampling.seed)
        request = _Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            limit=min(sampling.max_tokens, room),
            answer=asyncio.get_running_loop().create_future(),
            generator=generator,
        )
        self._waiting.append(request)
        self._wake.set()
        try:
            return await request.answer
        except asyncio.CancelledError:
            await self.abort(request_id)  # nobody wants the rest
            raise

    async def score(
        self, prompt_ids: list[int], response_ids: list[int], request_id: str, temperature: float = 1.0, top_k: int = 0
    ) -> ScoreOutput:
        """Score given tokens in one forward pass; see `Replica.score`."""
        check_score_request(prompt_ids, response_ids, temperature, top_k, self.max_model_len)
        await self._unpaused.wait()
        # Counted with nothing awaited in between: `pause` must never return before a pass starts.
        self._num_scoring += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._score, prompt_ids, response_ids, temperature, top_k
            )
        finally:
            self._num_scoring -= 1

    def _score(self, prompt_ids: list[int], response_ids: list[int], temperature: float, top_k: int) -> ScoreOutput:
        import torch

        if not response_ids:
            return ScoreOutput(logprobs=[], policy_version=self.version)
        num_scored = len(response_ids)
        ids = torch.tensor([[*prompt_ids, *response_ids]], device=self.model.device)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=num_scored + 1).logits[0, :-1]
            logprobs = torch.log_softmax(logits.float() / temperature, -1)  # [T, V]
            best = logprobs.topk(top_k, -1)
            return ScoreOutput(
                logprobs=logprobs.gather(-1, ids[0, -num_scored:, None])[:, 0].tolist(),
                top_ids=best.indices.tolist() if top_k else [],
                top_logprobs=best.values.tolist() if top_k else [],
                policy_version=self.version,
            )

    async def _batch_forever(self) -> None:
        """Run batch after batch of whatever is waiting; a failing batch fails its own requests only."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            # Lets requests that were sent together arrive together.
            await asyncio.sleep(0.002)
            # Last, and nothing is awaited between here and `_running`: `pause` must never return before a batch starts.
            await self._unpaused.wait()
            batch = self._waiting[: self.settings.max_num_seqs]
            del self._waiting[: len(batch)]
            if not self._waiting:
                self._wake.clear()
            if not batch:
                continue
            self._running = {request.request_id: request for request in batch}
            try:
                await loop.run_in_executor(self._thread, self._generate_batch, batch)
            except Exception as error:
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            finally:
                self._running = {}
            for request in batch:
                if not request.answer.done():
                    request.answer.set_result(_output(request))

    def _generate_batch(self, batch: list[_Request]) -> None:
        """Sample all requests of a batch to their ends."""
        import torch

        device = self.model.device
        width = max(len(request.prompt_ids) for request in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        attention = torch.zeros(len(batch), width, dtype=torch.long)
        for row, request in enumerate(batch):
            ids[row, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            attention[row, width - len(request.prompt_ids) :] = 1
        ids, attention = ids.to(device), attention.to(device)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        cache = None
        with torch.inference_mode():
            while any(request.stop_reason is None for request in batch):
                output = self.model(
                    input_ids=ids,
                    attention_mask=attention,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = output.past_key_values
                logits = output.logits[:, -1].float().cpu()
                sampled = [self._sample(request, logits[row]) for row, request in enumerate(batch)]
                ids = torch.tensor(sampled, device=device)[:, None]
                attention = torch.cat([attention, torch.ones(len(batch), 1, dtype=torch.long, device=device)], dim=1)
                positions = positions[:, -1:] + 1

    def _sample(self, request: _Request, logits: Any) -> int:
        """Draw and record the next token of one request, and decide whether it ends. Finished ones repeat token 0."""
        import torch

        if request.stop_reason is not None:
            return 0
        sampling = request.sampling
        logits = _penalized(logits, request)
        if sampling.temperature == 0:
            logprobs = torch.log_softmax(logits, -1)
            token = int(logprobs.argmax())
        else:
            logprobs = torch.log_softmax(_kept(logits / sampling.temperature, sampling), -1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=request.generator))
        request.token_ids.append(token)
        request.logprobs.append(float(logprobs[token]))
        request.versions.append(self.version)
        if (
            (token in self.end_ids and not sampling.ignore_eos)
            or token in sampling.stop_token_ids
            or self._hit_stop_string(request)
        ):
            request.stop_reason = "stop"
        elif len(request.token_ids) >= request.limit:
            request.stop_reason = "length"
        return token

    def _hit_stop_string(self, request: _Request) -> bool:
        """Whether the text so far contains one of the stop strings."""
        if not request.sampling.stop:
            return False
        text = self.tokenizer.decode(request.token_ids)
        return any(stop in text for stop in request.sampling.stop)

    async def abort(self, request_id: str) -> None:
        """End a request at its next token, or at once while it waits."""
        for request in [*self._waiting, *self._running.values()]:
            if request.request_id == request_id and request.stop_reason is None:
                request.stop_reason = "abort"
                if request in self._waiting:
                    self._waiting.remove(request)
                    if not request.answer.done():
                        request.answer.set_result(_output(request))

    async def pause(self) -> None:
        """Let the running batch and scoring passes end, and start no other until `resume`."""
        self._unpaused.clear()
        while self._running or self._num_scoring:
            await asyncio.sleep(0.005)

    async def resume(self) -> None:
        """Go on with the waiting requests."""
        self._unpaused.set()

    async def sleep(self) -> None:
        """Keep the memory: this engine shares nothing."""

    async def wake(self) -> None:
        """Nothing was given back."""

    async def start_weight_update(self) -> None:
        """Forget what the last update brought."""
        self._received = {}

    async def update_weights(self, bucket: dict[str, Any]) -> None:
        """Copy one bucket into the model's parameters."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load_bucket, bucket["path"])

    def _load_bucket(self, path: str) -> None:
        import torch
        from safetensors.torch import load_file

        parameters = dict(self.model.named_parameters())
        for name, tensor in load_file(path).items():
            if name not in parameters:
                raise ValueError(f"Weight update: replica {self.rank} has no parameter named {name!r}.")
            if parameters[name].shape != tensor.shape:
                raise ValueError(
                    f"Weight update: {name!r} has shape {tuple(tensor.shape)}, replica {self.rank} expects "
                    f"{tuple(parameters[name].shape)}."
                )
            with torch.no_grad():
                parameters[name].copy_(tensor)
            self._received[name] = tensor.numel() * tensor.element_size()

    async def finish_weight_update(self, version: int) -> WeightReport:
        """Take the version and report. No prefix cache outlives a batch here."""
        self.version = version
        checksum = await asyncio.get_running_loop().run_in_executor(self._thread, self._checksum)
        return WeightReport(version=version, bytes_received=dict(self._received), checksum=checksum)

    def _checksum(self) -> str:
        import torch

        digest = hashlib.sha256()
        for _, parameter in sorted(self.model.named_parameters()):
            digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    async def health(self) -> dict[str, Any]:
        """Which version is served."""
        if self._loop_task is None or self._loop_task.done():
            raise RuntimeError(f"Replica {self.rank}: the batching loop has ended.")
        return {"version": self.version, "engine_pids": []}

    async def close(self) -> None:
        """Stop the batching loop."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None
        self._thread.shutdown(wait=False, cancel_futures=True)


def _output(request: _Request) -> TokenOutput:
    """What the caller of a finished request gets."""
    return TokenOutput(
        token_ids=request.token_ids,
        logprobs=request.logprobs,
        stop_reason=request.stop_reason or "abort",
        policy_versions=request.versions,
    )


def _penalized(logits: Any, request: _Request) -> Any:
    """Logits after the repetition penalty (arXiv:1909.05858): seen tokens' divided, or multiplied if negative."""
    import torch

    penalty = request.sampling.repetition_penalty
    if penalty == 1.0:
        return logits
    seen = torch.tensor(sorted({*request.prompt_ids, *request.token_ids}))
    values = logits[seen]
    logits = logits.clone()
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def _kept(logits: Any, sampling: SamplingParams) -> Any:
    """Logits with everything outside top-k and top-p at minus infinity."""
    import torch

    if sampling.top_k > 0:
        threshold = logits.topk(min(sampling.top_k, logits.numel())).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = logits.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = order[mass_before >= sampling.top_p]
        logits = logits.index_fill(0, dropped, -torch.inf)
    return logits
