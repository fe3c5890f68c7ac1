"""Options of Lightning's Trainer that do not go with iterations, and what to set instead.

One Lightning epoch is one iteration and optimization is manual, so an option that stops, saves, validates or
accumulates by batches would act inside an iteration. They are refused when the configuration is parsed, before
anything starts.
"""

from __future__ import annotations

from typing import Any

from jsonargparse import ArgumentParser

from lit_rl.config_keys import ConfigError

_ENDS_INSIDE = "it would end a run inside an iteration"
_MANUAL = "optimization is manual"
REFUSED_OPTIONS: dict[str, tuple[str, str]] = {
    "max_steps": (_ENDS_INSIDE, "trainer.max_epochs (iterations)"),
    "min_steps": (_ENDS_INSIDE, "trainer.min_epochs (iterations)"),
    "max_time": (_ENDS_INSIDE, "trainer.max_epochs (iterations)"),
    "fast_dev_run": (_ENDS_INSIDE, "trainer.max_epochs=1"),
    "limit_train_batches": (_ENDS_INSIDE, "data.num_mini_batches and data.ppo_epochs"),
    "overfit_batches": ("the data module decides what an iteration trains on", "data.prompts_per_iteration"),
    "val_check_interval": ("it would validate inside an iteration", "trainer.check_val_every_n_epoch (iterations)"),
    "accumulate_grad_batches": (
        "micro-batches are formed by token budget",
        "data.max_tokens_per_micro_batch, and data.num_mini_batches for the number of optimizer steps",
    ),
    "gradient_clip_val": (_MANUAL, "model.max_grad_norm"),
    "gradient_clip_algorithm": (_MANUAL, "model.max_grad_norm, which clips by norm"),
    "reload_dataloaders_every_n_epochs": ("every iteration collects anew already", "data.prompts_per_iteration"),
    "default_root_dir": ("every run gets a folder of its own", "runs_dir and run_name"),
}
"""Option of the Trainer to the reason and to the option that is meant."""
_ONE_MEANS_ALL = ("val_check_interval", "limit_train_batches")


def check_trainer_options(settings: Any, parser: ArgumentParser) -> None:
    """Refuse Trainer options that would break iterations or precision.

    Args:
        settings: Parsed configuration of one sub-command.
        parser: Its parser, which knows the defaults.

    Raises:
        ConfigError: Naming the option, its value, the reason and the option to use instead.
    """
    for option, (reason, instead) in REFUSED_OPTIONS.items():
        value = settings.trainer.get(option)
        if value is None or value is False or value == parser.get_default(f"trainer.{option}"):
            continue
        # The float 1.0 is the whole epoch; the integer 1 is one batch.
        if option in _ONE_MEANS_ALL and isinstance(value, float) and value == 1.0:
            continue
        raise ConfigError(f"trainer.{option}={value} is refused: {reason}. Use {instead}.")
    if settings.trainer.get("precision") in ("bf16-true", "16-true"):
        raise ConfigError(
            f"trainer.precision={settings.trainer.precision} is refused: AdamW on 16-bit weights loses small updates. "
            "Use bf16-mixed (float32 weights, bf16 computation) or 32-true."
        )
    every = settings.trainer.get("check_val_every_n_epoch")
    if every is not None and every < 1:
        raise ConfigError(
            f"trainer.check_val_every_n_epoch={every} must be at least 1 (iterations between validations). "
            "To validate never, leave data.val_data out."
        )


def check_run_name(run_name: str) -> None:
    """Refuse a name that would put the run's folder elsewhere.

    Args:
        run_name: Name of the run.

    Raises:
        ConfigError: If it is no plain folder name.
    """
    if run_name in ("", ".", "..") or "/" in run_name or "\\" in run_name:
        raise ConfigError(
            f"run_name={run_name!r} must be the name of one folder, without separators. The parent of all runs is "
            "runs_dir."
        )
