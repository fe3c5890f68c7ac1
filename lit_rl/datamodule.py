"""The rollout side of a run: rows in, experience out, and everything that lives and dies with it.

`RolloutDataModule` owns the cursor over the training rows, the runtime with its managers (replicas, reward workers,
agent loops), and the collector. It knows nothing of the module that learns; weights come to the replicas through the
WeightSync callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from lit_rl.agents import AgentLoopManager, AgentSettings
from lit_rl.agents.run_tools import load_run_tools, report_template, row_schemas
from lit_rl.cluster import ProcessIdentity, Runtime
from lit_rl.data import ChatTemplate, PromptCursor, PromptSource, WithoutOverlong
from lit_rl.experience.batch import Experience
from lit_rl.experience.collector import Collector
from lit_rl.experience.data_module import RunDataModule
from lit_rl.experience.evaluation import EvaluationBatch, EvaluationLoader
from lit_rl.experience.exchange import ShareExchange, exchange_of_rank, exchange_of_rank_zero
from lit_rl.experience.loader import ExperienceLoader
from lit_rl.experience.option_checks import check_at_least, check_sampling
from lit_rl.experience.rank_zero import rank_zero_lost, wait_for_end
from lit_rl.experience.recording import RECORDING, ReplayedRollouts, TrajectoryRecorder, rollout_settings
from lit_rl.experience.share import ExperienceShare, PlanSettings, Rollout
from lit_rl.models.loading import load_tokenizer, max_positions, resolve_model
from lit_rl.rewards import RewardLoopManager, RewardSettings, check_data_sources
from lit_rl.serving import LLMServerManager, ServingSettings
from lit_rl.strategies import check_checkpoint, check_strategy
from lit_rl.types import Prompt, SamplingParams, Trajectory
from lit_rl.weight_sync.publisher import WeightPublisher

log = logging.getLogger(__name__)

T = TypeVar("T")


class RolloutDataModule(RunDataModule):
    """Rolls out trajectories with the current policy and serves them as mini-batches."""

    def __init__(
        self,
        model_name: str,
        train_data: PromptSource,
        val_data: PromptSource | None = None,
        test_data: PromptSource | None = None,
        prompts_per_iteration: int = 16,
        group_size: int = 8,
        num_mini_batches: int = 1,
        ppo_epochs: int = 1,
        max_tokens_per_micro_batch: int = 4096,
        micro_batch_size: int | None = None,
        share_prompts: bool = True,
        greedy_baseline: bool = False,
        dynamic_sampling_rounds: int = 0,
        max_prompt_tokens: int = 512,
        max_response_tokens: int = 512,
        sampling: SamplingParams | None = None,
        val_sampling: SamplingParams | None = None,
        val_samples_per_row: int = 1,
        agents: AgentSettings | None = None,
        rewards: RewardSettings | None = None,
        serving: ServingSettings | None = None,
        backend: str = "ray",
        max_staleness: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        num_cpus: int | None = None,
        rollout_timeout_s: float = 3600.0,
        record_trajectories: bool = False,
        replay_from: str | None = None,
        verbose: bool = False,
    ) -> None:
        """Keep the options and check what can be checked; nothing starts before `setup`.

        Args:
            model_name: The policy's name, for tokenizer and replicas.
            train_data: Rows to learn from.
            val_data: Rows of ``validate`` and of validation during ``fit``.
            test_data: Rows of ``test``.
            prompts_per_iteration: Rows per iteration, at least 1.
            group_size: Trajectories per row, at least 1.
            num_mini_batches: Optimizer steps per pass over an iteration's experience.
            ppo_epochs: Passes over an iteration's experience.
            max_tokens_per_micro_batch: Most tokens of one forward and backward pass.
            micro_batch_size: Most trajectories of one; ``null`` leaves it to the token budget.
            share_prompts: Compute the prompt of a group once per micro-batch (needs an attention that takes a mask).
            greedy_baseline: Also roll out one greedy trajectory per training row, for its reward only: the baseline of
                ReMax.
            dynamic_sampling_rounds: How often, per iteration, groups whose rewards are all equal are replaced by groups
                of fresh rows (DAPO's dynamic sampling); 0 is off. What is missing after that stays missing.
            max_prompt_tokens: Rows with longer prompts are left out and counted.
            max_response_tokens: Most tokens after the prompt.
            sampling: Training sampling; its ``max_tokens`` is ``max_response_tokens``.
            val_sampling: Sampling of validation, test and predict; greedy by default.
            val_samples_per_row: Trajectories per row in validation and test.
            agents: Agent loops and their workers.
            rewards: Reward functions and their workers.
            serving: Replicas.
            backend: ``ray`` (worker processes) or ``inline`` (everything in this process; for debugging and tests).
            max_staleness: Policy versions a trajectory may be old. Only 0, strictly on-policy, is built.
            shuffle: Use training rows in a random order, a new one each pass.
            seed: Root of row order and of all sampling seeds.
            num_cpus: Cores Ray may count on, where a local Ray is started; ``null`` takes what the machine has.
            rollout_timeout_s: Longest rollout of one iteration, in seconds.
            record_trajectories: Keep all training trajectories, with token ids and log-probs, in the run folder's
                ``recording/``.
            replay_from: Run folder with such a recording: learn from its trajectories. No engine, no Ray and no agent
                loop is started, and nothing is validated.
            verbose: Show the logs of Ray and the engines.
        """
        super().__init__()
        check_at_least(1, prompts_per_iteration=prompts_per_iteration, group_size=group_size)
        check_at_least(1, num_mini_batches=num_mini_batches, ppo_epochs=ppo_epochs)
        check_at_least(1, max_tokens_per_micro_batch=max_tokens_per_micro_batch, micro_batch_size=micro_batch_size)
        check_at_least(1, max_prompt_tokens=max_prompt_tokens, max_response_tokens=max_response_tokens)
        check_at_least(1, val_samples_per_row=val_samples_per_row, num_cpus=num_cpus)
        check_at_least(0, dynamic_sampling_rounds=dynamic_sampling_rounds)
        if not rollout_timeout_s > 0:  # NaN included
            raise ValueError(f"data.rollout_timeout_s={rollout_timeout_s} must be above 0 (seconds).")
        if backend not in ("ray", "inline"):
            raise ValueError(f"data.backend={backend!r} must be 'ray' or 'inline'.")
        if max_staleness != 0:
            raise ValueError(
                f"data.max_staleness={max_staleness}: only 0 (strictly on-policy) is built; asynchronous collection is "
                "not there yet."
            )
        self.model_name = model_name
        self.sources = {"train": train_data, "val": val_data, "test": test_data}
        self.prompts_per_iteration = prompts_per_iteration
        self.group_size = group_size
        self.num_mini_batches = num_mini_batches
        self.ppo_epochs = ppo_epochs
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.micro_batch_size = micro_batch_size
        self.share_prompts = share_prompts
        self.greedy_baseline = greedy_baseline
        self.dynamic_sampling_rounds = dynamic_sampling_rounds
        self.max_prompt_tokens = max_prompt_tokens
        self.max_response_tokens = max_response_tokens
        self.sampling = _limited(sampling or SamplingParams(), max_response_tokens)
        self.val_sampling = _limited(val_sampling or SamplingParams(temperature=0.0), max_response_tokens)
        self.val_samples_per_row = val_samples_per_row
        self.agents = agents or AgentSettings()
        self.rewards = rewards or RewardSettings()
        self.serving = serving or ServingSettings()
        self.backend = backend if replay_from is None else "inline"
        self.shuffle = shuffle
        self.seed = seed
        self.num_cpus = num_cpus
        self.rollout_timeout_s = rollout_timeout_s
        self.record_trajectories = record_trajectories
        self.replay_from = replay_from
        self.verbose = verbose
        check_sampling(self.sampling, "sampling")
        check_sampling(self.val_sampling, "val_sampling")
        if not self.sampling.temperature > 0:
            raise ValueError(
                f"data.sampling.temperature={self.sampling.temperature} must be above 0: a greedy policy explores "
                "nothing. Greedy validation is data.val_sampling."
            )

        self.last_validation_trajectories: list[Trajectory] = []
        self.servers: LLMServerManager | None = None
        self._rows: dict[str, list[Prompt]] = {}
        self._runtime: Runtime | None = None
        self._managers: list[Any] = []
        self._collector: Collector | None = None
        self._exchange: ShareExchange | None = None
        self._rank_zero = ProcessIdentity.current()
        self._data_sources: dict[str, list[str]] = {}
        self._tokenizer: Any = None
        self._tools: dict[str, Any] | None = None  # for schemas and limits; workers load and call their own

    # Lightning's hooks.

    def setup(self, stage: str) -> None:
        """On rank 0: read and check the rows, then start replicas, reward workers and agent workers, in that order.

        The other ranks connect to what rank 0 has started.
        """
        self._check_trainer()
        # Known before anything can fail, so that the other ranks can tell whether rank 0 is still there.
        self._rank_zero = self._broadcast(ProcessIdentity.current())
        try:
            if self.rank == 0:
                self._load_rows(stage)
                if self._collector is None:
                    self._start()
            self._join_ranks()
        except BaseException:
            self._stop()
            raise

    def train_dataloader(self) -> ExperienceLoader:
        """One pass over it is one iteration."""
        return ExperienceLoader(self._collect, self.ppo_epochs, self.num_mini_batches, self.rank)

    def val_dataloader(self) -> EvaluationLoader | list[Any]:
        """One item per data source of the validation rows."""
        return self._evaluation_loader("val")

    def test_dataloader(self) -> EvaluationLoader | list[Any]:
        """One item per data source of the test rows."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> EvaluationLoader | list[Any]:
        """The test rows, or the validation rows where there are none."""
        return self._evaluation_loader("test" if self.sources["test"] is not None else "val")

    def teardown(self, stage: str) -> None:
        """Stop everything; rank 0 comes last, since the others are connected to what it has started."""
        if self.rank > 0:
            self._stop()
        if self.world_size > 1:
            with contextlib.suppress(RuntimeError):  # a rank that has gone already waits for nobody
                self.trainer.strategy.barrier("RolloutDataModule.teardown")  # type: ignore[union-attr]
        self._stop()

    def on_exception(self, exception: BaseException) -> None:
        """Stop everything: Lightning calls no `teardown` after an exception (2.6)."""
        self._stop()
        if self.rank > 0 and isinstance(exception, KeyboardInterrupt | SystemExit):
            wait_for_end(self._rank_zero)  # it was interrupted too, and has more to stop

    # What callbacks use.

    @property
    def runtime(self) -> Runtime:
        """The running cluster."""
        if self._runtime is None:
            raise RuntimeError("RolloutDataModule: the runtime is there between setup and teardown.")
        return self._runtime

    @property
    def last_trajectories(self) -> list[Trajectory]:
        """All trajectories of the last iteration, failed ones included; on rank 0."""
        return [] if self._collector is None else self._collector.last_trajectories

    def probe_sequences(self, num: int, max_tokens: int) -> list[list[int]]:
        """Up to ``num`` short sequences of token ids to compare engine and trainer on.

        The ends of the last iteration's trajectories, from different prompts where there are as many; before the first
        rollout the texts of the first rows.
        """
        trajectories = self.last_trajectories
        if trajectories:
            chosen = trajectories[:: max(1, len(trajectories) // num)]
            sequences = [[*trajectory.prompt_ids, *trajectory.response_ids] for trajectory in chosen]
        else:
            rows = next((rows[:num] for rows in self._rows.values() if rows), [])
            texts = (" ".join(str(message.get("content", "")) for message in row.messages) for row in rows)
            sequences = [list(self._tokenizer(text)["input_ids"]) for text in texts]
        return [ids[-max_tokens:] for ids in sequences if len(ids) > 1][:num]

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._tokenizer.decode(token_ids))

    # Rows.

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus response, in tokens, that the replicas are started for."""
        return self.serving.max_model_len or self.max_prompt_tokens + self.max_response_tokens

    def _check_model_length(self, path: str) -> None:
        limit = max_positions(path)
        if limit is not None and self.max_model_len > limit:
            raise ValueError(
                f"data.max_prompt_tokens={self.max_prompt_tokens} and data.max_response_tokens="
                f"{self.max_response_tokens} need a model of {self.max_model_len} positions, {self.model_name} has "
                f"{limit}. Lower one of them."
            )

    def _load_rows(self, stage: str) -> None:
        wanted = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("test", "val")}[stage]
        if self.replay_from is not None:
            if stage != "fit":
                raise ValueError(f"data.replay_from={self.replay_from}: only fit is replayed. Leave it out elsewhere.")
            wanted = ("train",)  # there is no engine to validate with
        if stage != "fit" and not any(self.sources[name] is not None for name in wanted):
            options = " or ".join(f"data.{name}_data" for name in wanted)
            raise ValueError(f"{stage} has no rows: set {options}.")
        path = resolve_model(self.model_name)
        self._check_model_length(path)
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(path)
        template = ChatTemplate(
            self._tokenizer,
            template_kwargs=self.agents.chat_template_kwargs,
            custom_template=self.agents.chat_template,
        )
        if self._tools is None:
            self._tools = load_run_tools(self.agents)
            report_template(template, self._tools)
        for name in wanted:
            source = self.sources[name]
            if source is None or name in self._rows:
                continue
            schemas = row_schemas(self.agents, self._tools)
            kept = WithoutOverlong(source, template, self.max_prompt_tokens, tools=schemas)
            if kept.counts.num_overlong or kept.counts.num_failed:
                log.warning("data.%s_data: %s", name, kept.counts.describe())
            self._rows[name] = [kept[index] for index in range(len(kept))]
            if self.rewards.dispatches_by_data_source():
                # A row that nothing can score should fail now, not in the middle of training.
                check_data_sources(row.data_source for row in self._rows[name])
        if stage == "fit" and self._cursor is None:
            self._cursor = PromptCursor.for_source(self._rows["train"], seed=self.seed, shuffle=self.shuffle)

    def _evaluation_loader(self, name: str) -> EvaluationLoader | list[Any]:
        sources = self._data_sources.get(name, [])
        if not sources:
            return []
        assert self._exchange is not None
        exchange = self._exchange

        def evaluate(data_source: str) -> list[EvaluationBatch]:
            assert self._collector is not None
            if data_source == sources[0]:
                self.last_validation_trajectories = []
            trajectories = self._collector.evaluate(
                [row for row in self._rows[name] if row.data_source == data_source],
                self.val_sampling,
                samples_per_row=self.val_samples_per_row,
            )
            self.last_validation_trajectories += trajectories
            return EvaluationBatch.deal(data_source, trajectories, self.world_size)

        return EvaluationLoader(
            sources,
            lambda data_source: exchange.scatter(f"validation on {data_source}", lambda: evaluate(data_source)),
        )

    # Rollouts.

    def _collect(self) -> Experience:
        assert self._exchange is not None
        iteration = self.trainer.current_epoch if self.trainer is not None else 0
        settings = PlanSettings(
            num_mini_batches=self.num_mini_batches,
            ppo_epochs=self.ppo_epochs,
            max_tokens=self.max_tokens_per_micro_batch,
            micro_batch_size=self.micro_batch_size,
            share_prompts=self.share_prompts,
        )
        share: ExperienceShare = self._exchange.scatter(
            f"iteration {iteration}", lambda: self._roll_out(iteration).deal(settings, self.world_size)
        )
        return share.experience(settings, self.world_size, self.phase)

    def _roll_out(self, iteration: int) -> Rollout:
        assert self._collector is not None
        # Before anything is yielded: Lightning never resumes a sized loader after its last item (2.6).
        return self._collector.collect(
            iteration,
            self._next_rows(self.prompts_per_iteration),
            self.sampling,
            next_rows=self._next_rows,
            group_size=self.group_size,
            greedy_baseline=self.greedy_baseline,
            dynamic_sampling_rounds=self.dynamic_sampling_rounds,
        )

    def _next_rows(self, num: int) -> list[Prompt]:
        assert self._cursor is not None
        return [self._rows["train"][number] for number in self._cursor.next(num)]

    # Start and stop.

    def _check_trainer(self) -> None:
        if self.trainer is None:
            return
        check_strategy(self.trainer.strategy, self.backend, self.trainer.num_nodes)  # type: ignore[attr-defined]
        check_checkpoint(
            self.trainer.ckpt_path,  # type: ignore[attr-defined]
            self.trainer.strategy,
            self.trainer.world_size,
            is_training=self.trainer.state.fn not in ("validate", "test", "predict"),  # type: ignore[attr-defined]
        )
        if self.trainer.max_steps != -1:
            raise ValueError(
                f"trainer.max_steps={self.trainer.max_steps} would end the run inside an iteration: use "
                "trainer.max_epochs (iterations)."
            )
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, WeightPublisher) for callback in callbacks):
            raise ValueError(
                "Nothing brings the policy's weights into the replicas: is the WeightSync callback in "
                "trainer.callbacks? Add {class_path: lit_rl.callbacks.WeightSync}."
            )

    def _start(self) -> None:
        model = resolve_model(self.model_name)
        gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        runtime = self._runtime = Runtime(backend=self.backend, num_cpus=self.num_cpus, verbose=self.verbose)  # type: ignore[arg-type]
        runtime.start()
        run_folder = self.trainer.default_root_dir if self.trainer is not None else "."
        if self.replay_from is not None:
            replayed = ReplayedRollouts(self.replay_from, self._rollout_settings())
            self._collector = self._collector_of(runtime, replayed, replayed)
            return
        recorder = None
        if self.record_trajectories and self._cursor is not None:
            recorder = TrajectoryRecorder(f"{run_folder}/{RECORDING}", self._rollout_settings())
        servers = LLMServerManager(runtime, self.serving, model, self.max_model_len, gpu=gpu, verbose=self.verbose)
        rewards = RewardLoopManager(runtime, self.rewards, gpu=gpu, verbose=self.verbose)
        self._managers = [rewards, servers]
        start_s = self.serving.start_timeout_s
        runtime.loop.run(servers.start(), timeout_s=start_s + 60, what=f"{self.serving.num_replicas} replicas to start")
        runtime.loop.run(rewards.start(), timeout_s=start_s + rewards.start_timeout_s, what="reward workers to start")
        settings = self.agents.in_run_folder(run_folder)
        agents = AgentLoopManager(runtime, settings, servers.client(), model, rewards.handles, self._tools)
        self._managers.insert(0, agents)
        runtime.loop.run(agents.start(), timeout_s=start_s, what="agent-loop workers to start")
        self.servers = servers
        self._collector = self._collector_of(runtime, agents, servers, recorder)

    def _collector_of(
        self, runtime: Runtime, agents: Any, servers: Any, recorder: TrajectoryRecorder | None = None
    ) -> Collector:
        return Collector(
            runtime=runtime,
            agents=agents,
            servers=servers,
            phase=self.phase,
            seed=self.seed,
            timeout_s=self.rollout_timeout_s,
            recorder=recorder,
        )

    def _rollout_settings(self) -> dict[str, Any]:
        assert self._cursor is not None
        return rollout_settings(self, self._cursor)

    def _join_ranks(self) -> None:
        """Give every rank its end of the exchange, and the data sources it will be asked to evaluate."""
        sources = {name: sorted({row.data_source for row in rows}) for name, rows in self._rows.items()}
        place = ("", "")
        if self.rank == 0:
            place = (self.runtime.address, self.runtime.namespace)
            if self._exchange is None:
                self._exchange = exchange_of_rank_zero(self.runtime, self.world_size, self._rank_zero)
        try:
            self._data_sources, (address, namespace) = self._broadcast((sources, place))
        except RuntimeError as error:
            if self.rank == 0:
                raise  # another rank has ended
            raise rank_zero_lost("the rollout side to start", self.rank, self._rank_zero, error) from error
        if self._exchange is None:
            backend: Any = self.backend
            self._runtime = Runtime(backend, verbose=self.verbose, address=address, namespace=namespace)
            # Each round of dynamic sampling is a rollout of its own.
            longest_s = (1 + self.dynamic_sampling_rounds) * self.rollout_timeout_s + 60.0
            self._exchange = exchange_of_rank(self._runtime, self.rank, self._rank_zero, longest_s)

    def _broadcast(self, value: T) -> T:
        """Rank 0's value."""
        return value if self.world_size == 1 else self.trainer.strategy.broadcast(value)  # type: ignore[union-attr]

    def _stop(self) -> None:
        """Stop managers and runtime; safe to call twice."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
        runtime, self._runtime = self._runtime, None
        managers, self._managers = self._managers, []
        self.servers = self._collector = None
        if runtime is None:
            return
        try:
            # At once: after Ctrl-C a person waits for this.
            results = runtime.loop.run(_stop_all(managers), timeout_s=30.0, what="engines and workers to stop")
        except TimeoutError as error:
            results = [error]
        for result in results:
            if isinstance(result, Exception):
                # The runtime ends what is left; an error here must not keep it from doing so.
                log.warning("Not everything stopped cleanly: %s", result)
        runtime.stop()


async def _stop_all(managers: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*(manager.stop() for manager in managers), return_exceptions=True)


def _limited(sampling: SamplingParams, max_response_tokens: int) -> SamplingParams:
    """The sampling with the data's response limit, which is the one setting for it."""
    return replace(sampling, max_tokens=max_response_tokens)
