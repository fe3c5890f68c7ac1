"""How the command line ends a run that cannot begin: one line with the option and the reason, and exit code 2.

A fault of our own or of a user's class keeps its traceback: only what is about an option is cut down.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser

from lit_rl.config_keys import ConfigError
from lit_rl.option_values import shortened

# Modules whose errors at construction are about an option: ours, and what the Trainer is made of.
_CHECKED_BY = ("lit_rl.", "lightning.pytorch.trainer.", "lightning.fabric.", "lightning.pytorch.accelerators.")


class ShortErrorParser(LightningArgumentParser):
    """The parser, its errors cut down to option and reason."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise instead of printing the usage, which has a line for each of some hundred options.

        Args:
            message: jsonargparse's.
            ex: Its cause.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(shortened(message)) from ex


def refused_option(error: BaseException) -> BaseException | None:
    """The error about an option that another one was raised for; ``None`` where it is about something else.

    Args:
        error: What building a part ended with.
    """
    # jsonargparse wraps it once per level, in the types it tried and the whole configuration.
    cause: BaseException | None = error
    while cause is not None and not _raised_in(cause).startswith(_CHECKED_BY):
        cause = cause.__cause__
    return cause if isinstance(cause, ValueError | OSError | MisconfigurationException) else None


def stop_with(error: BaseException) -> NoReturn:
    """End the program with the message alone.

    Args:
        error: Its text is what a person reads.
    """
    sys.stderr.write(f"lit-rl: error: {error}\n")
    raise SystemExit(2) from error


def _raised_in(error: BaseException) -> str:
    """Name of the module that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
