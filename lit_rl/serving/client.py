"""Sends requests to replicas, and sees them through failures, aborts and weight updates.

Lives in agent workers: agent loop -> **client** -> balancer (which replica) and replica (the tokens). One request per
turn is sent; batching belongs to the engine. Nothing here knows text, tools or rewards.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from typing import Any

from lit_rl.cluster import WorkerDied, WorkerHandle
from lit_rl.serving.balancer_session import BalancerSession
from lit_rl.types import SamplingParams, ScoreOutput, TokenOutput

_INFRASTRUCTURE_ERRORS = (WorkerDied, TimeoutError, ConnectionError)
"""What another replica may well do better (design D12); anything else is raised at once."""

_MAX_PAUSE_S = 1.0


class GenerationFailedError(ConnectionError):
    """No replica answered: attempts or time have run out. The last failure is the cause."""


@dataclasses.dataclass
class ClientCounters:
    """What happened to this client's requests since it was made.

    Attributes:
        requests: Calls of `LLMServerClient.generate` and `LLMServerClient.score`.
        retries: Attempts after a replica failed.
        failovers: Retries that went to another replica.
        resumes: Attempts after an abort, with the tokens so far.
        waits: Times no replica was available.
    """

    requests: int = 0
    retries: int = 0
    failovers: int = 0
    resumes: int = 0
    waits: int = 0


class LLMServerClient:
    """Generates tokens on whichever replica the balancer chooses. Picklable (with Ray); each copy counts for itself.

    Args:
        balancer: Worker that serves a `LoadBalancer` whose server ids are the keys of ``replicas``.
        replicas: Replica workers by server id. For others the balancer is asked (`LoadBalancer.get_handles`).
        request_timeout_s: Longest wait for one attempt on one replica, in seconds.
        deadline_s: Longest duration of one `generate` or `score`, all attempts and waits together, in seconds; ``None``
            allows ``max_attempts * request_timeout_s``.
        max_attempts: Attempts that may fail because of a replica, at least 1. Resuming after an abort is not a failure.
        balancer_timeout_s: Longest wait for the balancer to answer, in seconds.
        pause_s: Shortest pause after an abort without new tokens, and while no replica is available, in seconds.
    """

    def __init__(
        self,
        balancer: WorkerHandle,
        replicas: dict[str, WorkerHandle],
        *,
        request_timeout_s: float = 600.0,
        deadline_s: float | None = None,
        max_attempts: int = 3,
        balancer_timeout_s: float = 30.0,
        pause_s: float = 0.05,
    ) -> None:
        if max_attempts < 1:
            raise ValueError(f"LLMServerClient(max_attempts={max_attempts}): must be at least 1.")
        self._balancer = balancer
        self._replicas = dict(replicas)
        self._request_timeout_s = request_timeout_s
        self._deadline_s = max_attempts * request_timeout_s if deadline_s is None else deadline_s
        self._max_attempts = max_attempts
        self._balancer_timeout_s = balancer_timeout_s
        self._pause_s = pause_s
        self._session: BalancerSession | None = None
        self.counters = ClientCounters()

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, conversation_id: str) -> TokenOutput:
        """Sample one response.

        An aborted generation is taken up again with prompt and tokens so far, on the same replica or another, possibly
        under newer weights (``policy_versions`` says which token came from which). A replica that dies or does not
        answer loses what it sampled in that attempt; tokens of earlier attempts are kept.

        Args:
            prompt_ids: Token ids of everything so far.
            sampling: ``max_tokens`` counts over all attempts.
            conversation_id: Turns with the same id prefer the same replica, for its prefix cache.

        Returns:
            Tokens of all attempts, with stop reason ``stop`` or ``length``.

        Raises:
            ValueError: The replica refused the request, for example because the prompt is too long.
            GenerationFailedError: ``max_attempts`` failed, or ``deadline_s`` has passed.
        """
        self.counters.requests += 1
        run = _Run(conversation_id, prompt_ids, sampling, time.monotonic() + self._deadline_s)
        while True:
            server_id = await self._acquire(run)
            # A fresh id each time: the engine may still know the last one.
            request = ([*run.prompt_ids, *run.token_ids], run.next_sampling(), uuid.uuid4().hex)
            output: TokenOutput | None = await self._attempt(run, server_id, "generate", *request)
            if output is None:
                continue
            run.append(output)
            if output.stop_reason != "abort":
                return run.output(output.stop_reason)
            if run.num_left <= 0:
                return run.output("length")
            self.counters.resumes += 1
            if not output.token_ids:
                await self._pause(run, "replicas kept aborting the request")

    async def score(
        self,
        prompt_ids: list[int],
        response_ids: list[int],
        conversation_id: str,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
    ) -> ScoreOutput:
        """Return log-probs of given tokens from whichever replica answers; see `Replica.score`.

        Raises:
            ValueError: The replica refused the request, for example because the sequence is too long.
            GenerationFailedError: ``max_attempts`` failed, or ``deadline_s`` has passed.
        """
        self.counters.requests += 1
        run = _Run(conversation_id, prompt_ids, SamplingParams(), time.monotonic() + self._deadline_s)
        while True:
            server_id = await self._acquire(run)
            request = (prompt_ids, response_ids, uuid.uuid4().hex, temperature, top_k)
            output: ScoreOutput | None = await self._attempt(run, server_id, "score", *request)
            if output is not None:
                return output

    async def classify(self, token_ids: list[int]) -> list[float]:
        """Return what a sequence classifier says of a conversation; attempts and failures as in `generate`.

        Args:
            token_ids: The whole conversation.

        Returns:
            The classifier's outputs before any activation, one per label.

        Raises:
            ValueError: The replica refused the request, for example because it is too long.
            GenerationFailedError: ``max_attempts`` failed, or ``deadline_s`` has passed.
        """
        self.counters.requests += 1
        deadline = time.monotonic() + self._deadline_s
        run = _Run(uuid.uuid4().hex, token_ids, SamplingParams(max_tokens=0), deadline)
        while True:
            server_id = await self._acquire(run)
            outputs: list[float] | None = await self._attempt(run, server_id, "classify", token_ids)
            if outputs is not None:
                return outputs

    async def acquire(self, conversation_id: str) -> str | None:
        """Return the server of a conversation, to be given back with `release`; ``None`` if there is none."""
        return await self._get_session().acquire(conversation_id)

    def release(self, server_id: str) -> None:
        """Give back what `acquire` returned."""
        self._get_session().release(server_id)

    async def _acquire(self, run: _Run) -> str:
        session = self._get_session()
        while (server_id := await session.acquire(run.conversation_id, run.avoid)) is None:
            self.counters.waits += 1
            await self._pause(run, "no replica was available")
        self.counters.failovers += run.failed_server not in (None, server_id)
        run.failed_server = None
        return server_id

    async def _attempt(self, run: _Run, server_id: str, method: str, *arguments: Any) -> Any:
        """Return what the replica answered, or ``None`` when it failed and the next attempt is due."""
        session = self._get_session()
        failure: BaseException | None = None
        try:
            replica = await self._get_replica(server_id)
            timeout_s = max(0.001, min(self._request_timeout_s, run.deadline - time.monotonic()))
            return await replica.call(method, *arguments, timeout_s=timeout_s)
        except _INFRASTRUCTURE_ERRORS as error:
            failure = error
        finally:
            session.release(server_id, has_failed=failure is not None, is_dead=isinstance(failure, WorkerDied))
        self._count_failure(run, server_id, failure)
        return None

    def _count_failure(self, run: _Run, server_id: str, failure: BaseException) -> None:
        run.failures += 1
        run.avoid = (*run.avoid, server_id)
        run.failed_server = server_id
        if run.failures >= self._max_attempts:
            raise GenerationFailedError(
                f"Conversation {run.conversation_id}: {run.failures} attempts failed, "
                f"on replicas {', '.join(run.avoid)}, the last one with: {failure}"
            ) from failure
        run.check_deadline(self._deadline_s, f"replica {server_id} failed with: {failure}", failure)
        self.counters.retries += 1

    async def _get_replica(self, server_id: str) -> WorkerHandle:
        if server_id not in self._replicas:
            self._replicas.update(await self._balancer.call("get_handles", timeout_s=self._balancer_timeout_s))
        if server_id not in self._replicas:
            raise ConnectionError(f"The balancer chose server {server_id}, but has no handle of it.")
        return self._replicas[server_id]

    async def _pause(self, run: _Run, reason: str) -> None:
        run.check_deadline(self._deadline_s, reason)
        run.pauses += 1
        await asyncio.sleep(min(_MAX_PAUSE_S, self._pause_s * 2 ** min(run.pauses - 1, 10)))

    def _get_session(self) -> BalancerSession:
        if self._session is None or self._session.loop is not asyncio.get_running_loop():
            self._session = BalancerSession(self._balancer, self._balancer_timeout_s)
        return self._session

    def __getstate__(self) -> dict[str, Any]:
        # The session belongs to an event loop of this process, the counters to this copy.
        return {**self.__dict__, "_session": None, "counters": ClientCounters()}


class _Run:
    """One `generate` or `score`: what has been sampled, and how often it failed."""

    def __init__(self, conversation_id: str, prompt_ids: list[int], sampling: SamplingParams, deadline: float) -> None:
        self.conversation_id = conversation_id
        self.prompt_ids = prompt_ids
        self.sampling = sampling
        self.deadline = deadline
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.policy_versions: list[int] = []
        self.num_preempted = 0
        self.failures = 0
        self.pauses = 0
        self.avoid: tuple[str, ...] = ()
        self.failed_server: str | None = None  # in the attempt just before

    @property
    def num_left(self) -> int:
        """Tokens that may still be sampled."""
        return self.sampling.max_tokens - len(self.token_ids)

    def next_sampling(self) -> SamplingParams:
        """Sampling of the next attempt."""
        if not self.token_ids:
            return self.sampling
        # The same seed again would draw the same random numbers for the next tokens as for the first.
        seed = None if self.sampling.seed is None else self.sampling.seed + len(self.token_ids)
        return dataclasses.replace(self.sampling, max_tokens=self.num_left, seed=seed)

    def append(self, output: TokenOutput) -> None:
        """Add what an attempt sampled."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.policy_versions += output.policy_versions
        self.num_preempted += output.num_preempted
        if output.token_ids:
            self.pauses = 0

    def output(self, stop_reason: Any) -> TokenOutput:
        """Return all that was sampled."""
        return TokenOutput(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            stop_reason=stop_reason,
            policy_versions=self.policy_versions,
            num_preempted=self.num_preempted,
        )

    def check_deadline(self, deadline_s: float, reason: str, cause: BaseException | None = None) -> None:
        """Raise if time has run out."""
        if time.monotonic() >= self.deadline:
            raise GenerationFailedError(
                f"Conversation {self.conversation_id}: no response within {deadline_s:g} s, because {reason}"
            ) from cause
