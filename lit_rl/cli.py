"""The command line: ``lit-rl fit --config file.yaml``, and validate, test, predict.

`RLCLI` is a LightningCLI with what reinforcement learning needs on top: a folder of its own for every run, the
callbacks every run wants, options of the Trainer that would end or save inside an iteration refused with the one to
use instead, and mistyped keys found before anything starts. It builds and runs; what a run does is in
`lit_rl.datamodule`, `lit_rl.modules` and `lit_rl.callbacks`. Further sub-commands are methods of `RLCLI` named in
`RLCLI.subcommands`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionYesNo
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning_utilities.core.rank_zero import rank_zero_only

from lit_rl.callbacks.checkpoint import IterationCheckpoint
from lit_rl.callbacks.progress import RLProgress
from lit_rl.callbacks.reward_plot import RewardPlot
from lit_rl.callbacks.run_config import LogRunConfig, keep_wandb_files_in
from lit_rl.callbacks.trajectory_log import TrajectoryLog
from lit_rl.checkpoint_file import check_checkpoint
from lit_rl.cli_errors import ShortErrorParser, refused_option, stop_with
from lit_rl.config_keys import ConfigError, KeyChecker, parser_keys
from lit_rl.export_command import run_export
from lit_rl.metrics_file import MetricsFileLogger
from lit_rl.models.loading import ModelLoadError
from lit_rl.quiet import configure_logging
from lit_rl.refused_options import check_run_name, check_trainer_options
from lit_rl.rollout_command import run_rollout
from lit_rl.run_folder import RUN_FOLDER_VARIABLE, create_run_folder, inherited_run_folder, resolve_checkpoint
from lit_rl.run_messages import how_to_resume, outcome

TRAINER_DEFAULTS = {
    "log_every_n_steps": 1,
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
LINKS = {
    "model.init_args.model_name": "model_name",
    "data.init_args.model_name": "model_name",
    "data.init_args.verbose": "verbose",
}
"""Option of a part to the top-level option that alone sets it."""
DEFAULT_DATA = "lit_rl.RolloutDataModule"
# Run-only keys of a saved configuration: arguments of the sub-command, not of the objects.
_RUN_ARGUMENTS = ("ckpt_path", "weights_only")
_INTERRUPTED = 130
_TERMINATED = 143


class RLCLI(LightningCLI):
    """LightningCLI for reinforcement learning.

    Args:
        model_class: Base class of the modules that ``--model`` may name.
        datamodule_class: Base class of the data modules that ``--data`` may name.
        args: Arguments as a list or a nested dictionary; ``None`` takes those of the process.
        run: Run the sub-command. ``False`` parses without one and builds ``model``, ``datamodule`` and ``trainer``.
        default_data: Data module where none is named, as a dotted path; ``None``: ``datamodule_class``.
        **kwargs: Further arguments of LightningCLI.
    """

    def __init__(
        self,
        model_class: type[LightningModule],
        datamodule_class: type[LightningDataModule],
        *,
        args: Sequence[str] | dict[str, Any] | None = None,
        run: bool = True,
        default_data: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.default_data = default_data
        self.run_folder: Path | None = None
        self.ckpt_path: str | None = None
        defaults: dict[str, Any] = {
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            "seed_everything_default": 1,
            "save_config_callback": None,
            "auto_configure_optimizers": False,
            "trainer_defaults": TRAINER_DEFAULTS,
            "parser_class": ShortErrorParser,
            # Flat: given per sub-command, abbreviations are accepted all the same (jsonargparse 4.53).
            "parser_kwargs": {
                "allow_abbrev": False,
                "epilog": "lit-rl rollout --config FILE --row 3 holds one conversation and prints it. "
                "lit-rl export --ckpt_path RUN --out FOLDER writes the policy as a Hugging Face folder.",
            },
        }
        super().__init__(model_class, datamodule_class, args=args, run=run, **{**defaults, **kwargs})  # type: ignore[arg-type]

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Sub-commands, methods of the Trainer, each with the arguments of its method that are no options."""
        # One configuration file serves all of them, so none has an option of its own.
        return {name: skip | {"verbose", "return_predictions"} for name, skip in LightningCLI.subcommands().items()}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the top-level options and link them to the parts that use them.

        Args:
            parser: Parser of one sub-command.
        """
        parser.add_argument(
            "--model_name", type=str | None, default=None, help="Model of all parts: hub id, folder, or bundled/..."
        )
        parser.add_argument(
            "--run_name", type=str | None, default=None, help="Name of the run (default: name of the config file)."
        )
        parser.add_argument("--runs_dir", type=str, default="runs", help="Folder of all runs.")
        parser.add_argument(
            "--verbose",
            action=ActionYesNo,
            nargs="?",
            default=False,
            help="Show the logs of vLLM, Ray and other libraries.",
        )
        parser.add_argument(
            "--default_callbacks",
            type=bool,
            default=True,
            help="Add IterationCheckpoint, RLProgress, and where it rolls out WeightSync, TrajectoryLog, RewardPlot, "
            "unless configured.",
        )
        for target, source in LINKS.items():
            parser.link_arguments(source, target)
        if self.default_data is not None:
            # As YAML that names no class_path means it; a base class alone would mean itself.
            parser.set_defaults({"data": {"class_path": self.default_data}})

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Check the keys, parse, refuse options that do not go with iterations, and set log levels for a run.

        Args:
            parser: The main parser.
            args: See the class.
        """
        try:
            self._check_keys(args)
            super().parse_arguments(parser, args)
            subcommand = self.config.get("subcommand")
            settings = self.config[subcommand] if subcommand else self.config
            check_trainer_options(settings, self._parser(subcommand))
            if settings.run_name is None:
                files = settings.get("config") or []
                settings.run_name = Path(os.fspath(files[-1])).stem if files else "run"
            check_run_name(settings.run_name)
        except ConfigError as error:
            stop_with(error)
        if subcommand:
            configure_logging(settings.verbose)

    def _check_keys(self, args: Any) -> None:
        if isinstance(args, dict):
            KeyChecker(parser_keys(self.parser), LINKS).check_mapping(args, "arguments")
            return
        arguments = list(sys.argv[1:] if args is None else args)
        parsers = getattr(self, "_subcommand_parsers", None)
        if parsers is None:
            KeyChecker(parser_keys(self.parser), LINKS).check_arguments(arguments)
        elif (position := next((i for i, word in enumerate(arguments) if word in parsers), None)) is not None:
            KeyChecker(parser_keys(parsers[arguments[position]]), LINKS).check_arguments(arguments[position + 1 :])

    def _parse_ckpt_path(self) -> None:
        """Nothing: the configuration is the only source of hyper-parameters, a checkpoint never overrides it."""

    def before_instantiate_classes(self) -> None:
        """Find the checkpoint and look into it, when a sub-command runs."""
        if self.subcommand is None:
            return
        runs_dir, run_name = self._get(self.config, "runs_dir"), self._get(self.config, "run_name")
        given = self.config[self.subcommand].get("ckpt_path")
        try:
            self.ckpt_path = resolve_checkpoint(given, runs_dir, run_name, required=self.subcommand != "fit")
            if self.ckpt_path is not None:
                check_checkpoint(self.ckpt_path, resumes=self.subcommand == "fit")
        except (FileNotFoundError, ConfigError) as error:
            stop_with(error)

    def instantiate_classes(self) -> None:
        """Build the parts; an option that one of ours or the Trainer refuses stops the run with its message alone."""
        try:
            super().instantiate_classes()
        except (ValueError, OSError, MisconfigurationException) as error:
            if (cause := refused_option(error)) is not None:
                stop_with(cause)
            raise

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the Trainer with the run's folder, metrics file and callbacks.

        Args:
            **kwargs: Arguments that take precedence.
        """
        settings = self._get(self.config_init, "trainer", default={})
        try:
            callbacks = self._callbacks(
                settings.get("callbacks"), checkpointing=settings.get("enable_checkpointing") is not False
            )
        except ConfigError as error:
            stop_with(error)
        self.run_folder = self._make_run_folder()
        given = settings.get("logger")
        loggers = list(given) if isinstance(given, list | tuple) else [given] if isinstance(given, Logger) else []
        keep_wandb_files_in(self.run_folder, loggers)
        return super().instantiate_trainer(
            **{
                "default_root_dir": str(self.run_folder),
                "logger": [MetricsFileLogger(self.run_folder), *loggers],
                "callbacks": [*callbacks, LogRunConfig(self._resolved_config())],
                **kwargs,
            }
        )

    def _callbacks(self, given: Any, *, checkpointing: bool) -> list[Callback]:
        """The user's callbacks, with the default ones the user lists none of: WeightSync first, what reports last."""
        users: list[Callback] = list(given) if isinstance(given, list | tuple) else [given] if given else []
        for callback in users:
            if isinstance(callback, ModelCheckpoint) and not isinstance(callback, IterationCheckpoint):
                raise ConfigError(
                    f"trainer.callbacks: {type(callback).__name__} may save inside an iteration, which cannot be "
                    "resumed. Use lit_rl.callbacks.IterationCheckpoint (monitor, mode, keep, every_n_iterations)."
                )
        if not self._get(self.config, "default_callbacks"):
            return users
        first, last = self.default_callbacks()
        if not checkpointing or any(isinstance(item, IterationCheckpoint) and item.monitor is None for item in users):
            last = [item for item in last if not issubclass(item, IterationCheckpoint)]

        def missing(classes: list[type[Callback]]) -> list[Callback]:
            # A checkpoint callback that keeps the best is a second one beside that which keeps the last.
            return [
                cls()
                for cls in classes
                if issubclass(cls, IterationCheckpoint) or not any(isinstance(u, cls) for u in users)
            ]

        return [*missing(first), *users, *missing(last)]

    def default_callbacks(self) -> tuple[list[type[Callback]], list[type[Callback]]]:
        """Classes added before and after the user's callbacks unless the configuration lists one of them."""
        from lit_rl.callbacks.weight_sync import WeightSync
        from lit_rl.sft_datamodule import SFTDataModule

        if isinstance(self.datamodule, SFTDataModule):
            return [], [RLProgress, IterationCheckpoint]  # it has no engine and no rollouts
        return [WeightSync], [TrajectoryLog, RewardPlot, RLProgress, IterationCheckpoint]

    def _make_run_folder(self) -> Path:
        """Make this run's folder with its resolved configuration on rank 0, and tell the ranks it launches."""
        runs_dir, run_name = self._get(self.config, "runs_dir"), self._get(self.config, "run_name")
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return inherited_run_folder(runs_dir, run_name)
        folder = create_run_folder(runs_dir, run_name)
        os.environ[RUN_FOLDER_VARIABLE] = str(folder)
        parser = self._parser(self.subcommand)
        settings = self.config[self.subcommand] if self.subcommand else self.config
        parser.save(settings, folder / "config.yaml", skip_unset=False, multifile=False)
        return folder

    def _resolved_config(self) -> dict[str, Any]:
        """The whole configuration as nested plain values, linked ones included."""
        parser = self._parser(self.subcommand)
        settings = self.config[self.subcommand] if self.subcommand else self.config
        return dict(yaml.safe_load(parser.dump(settings, skip_unset=False, skip_link_targets=False, format="yaml")))

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        arguments["ckpt_path"] = self.ckpt_path
        if subcommand == "predict":
            # Predictions are trajectories, and go to a file.
            arguments["return_predictions"] = False
        self._print_start_line(subcommand)
        return arguments

    @rank_zero_only
    def _print_start_line(self, subcommand: str) -> None:
        source = f" from {self.ckpt_path}" if self.ckpt_path else ""
        from lit_rl.datamodule import RolloutDataModule

        starting = "engines and workers" if isinstance(self.datamodule, RolloutDataModule) else "training"
        print(f"{subcommand}{source}: files go to {self.run_folder}; starting {starting} ...", flush=True)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run it and say where its results are; when it is cut short, say how to go on."""
        try:
            super()._run_subcommand(subcommand)
            self._print_outcome(subcommand)
        except KeyboardInterrupt:
            self._exit_resumable(_INTERRUPTED, "Interrupted")
        except SystemExit as request:
            # Lightning turns Ctrl-C into exit code 1 once it has cleaned up (2.6).
            if isinstance(request.__context__, KeyboardInterrupt):
                self._exit_resumable(_INTERRUPTED, "Interrupted")
            if request.code == _TERMINATED:
                self._exit_resumable(_TERMINATED, "Terminated")
            raise
        except BaseException as error:
            self._print_resume_line(f"Stopped by {type(error).__name__}", only_with_checkpoint=True)
            raise

    def _exit_resumable(self, code: int, what: str) -> NoReturn:
        self._print_resume_line(what)
        raise SystemExit(code)

    @rank_zero_only
    def _print_outcome(self, subcommand: str) -> None:
        assert self.run_folder is not None
        if (line := outcome(subcommand, self.run_folder)) is not None:
            print(line, flush=True)

    @rank_zero_only
    def _print_resume_line(self, what: str, *, only_with_checkpoint: bool = False) -> None:
        if self.subcommand != "fit" or self.run_folder is None:
            return
        if (line := how_to_resume(self.run_folder, what, only_with_checkpoint=only_with_checkpoint)) is not None:
            sys.stderr.write(f"{line}\n")


def base_classes() -> tuple[type[LightningModule], type[LightningDataModule]]:
    """Base classes of what ``--model`` and ``--data`` may name; their subclasses are imported, for the help."""
    import lit_rl.modules
    import lit_rl.sft_datamodule  # noqa: F401
    from lit_rl.experience.data_module import RunDataModule
    from lit_rl.modules.policy_module import PolicyModule

    return PolicyModule, RunDataModule


def build_from_config(
    path: str | Path,
    args: Sequence[str] = (),
    *,
    model_class: type[LightningModule] | None = None,
    datamodule_class: type[LightningDataModule] | None = None,
) -> RLCLI:
    """Build module, data module and Trainer from a configuration file without running, for notebooks and scripts.

    Args:
        path: A recipe or the ``config.yaml`` of a run.
        args: Overrides in command-line form, such as ``["--trainer.max_epochs=1"]``.
        model_class: Base class of modules; ``None`` takes PolicyModule.
        datamodule_class: Base class of data modules; ``None`` takes RunDataModule.

    Returns:
        The command line object with ``model``, ``datamodule``, ``trainer`` and ``run_folder``.
    """
    classes = base_classes()
    default_data = DEFAULT_DATA if datamodule_class is None else None
    model_class, datamodule_class = model_class or classes[0], datamodule_class or classes[1]
    content = yaml.safe_load(Path(path).read_text())
    plain = {key: value for key, value in content.items() if key not in _RUN_ARGUMENTS}
    if plain.get("run_name") is None:
        plain["run_name"] = Path(path).stem
    with tempfile.TemporaryDirectory() as folder:
        cleaned = Path(folder) / "config.yaml"
        cleaned.write_text(yaml.safe_dump(plain))
        return RLCLI(
            model_class, datamodule_class, args=["--config", str(cleaned), *args], run=False, default_data=default_data
        )


def _terminate(signum: int, frame: Any) -> NoReturn:
    """Turn SIGTERM into an exception at once, so that a rollout in progress is cleaned up rather than waited for."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(_TERMINATED)


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of ``lit-rl``.

    Args:
        args: Arguments after the program's name; ``None`` takes those of the process.
    """
    signal.signal(signal.SIGTERM, _terminate)
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        if arguments[:1] == ["rollout"]:
            run_rollout(arguments[1:])
            return
        if arguments[:1] == ["export"]:
            run_export(arguments[1:])
            return
        RLCLI(*base_classes(), args=args, default_data=DEFAULT_DATA)
    except ModelLoadError as error:
        stop_with(error)
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


if __name__ == "__main__":
    main()
