"""Turn third-party logs down to what a user of lit_rl can act on.

Called by the command line once, before models and engines are built; ``--verbose`` leaves everything as the libraries
have it. Importing this module changes nothing. Variables the user has set are kept.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

_QUIET_VARIABLES = {
    # Read by engine and worker processes, which inherit the environment of the process that starts them.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_LOG_LEVEL": "ERROR",
}
_QUIET_LOGGERS = {
    "lightning": logging.WARNING,
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    "ray": logging.ERROR,
    "vllm": logging.ERROR,
    "transformers": logging.ERROR,
    "httpx": logging.WARNING,
    "asyncio": logging.WARNING,
}
# Advice that does not apply: rollouts are no DataLoader, the reference network is in eval mode on purpose, an iteration
# whose rewards are all equal has no optimizer step.
_QUIET_WARNINGS = (
    r".*does not have many workers.*",
    r".*Found \d+ module\(s\) in eval mode.*",
    r".*Detected call of `lr_scheduler.step\(\)` before `optimizer.step\(\)`.*",
    r".*`training_step` returned `None`.*",
    r".*`IterableDataset` has `__len__` defined.*",
    r".*Total length of `list` across ranks is zero.*",
    r".*LightningCLI's args parameter is intended to run from within Python.*",
    # Every rank logs the same numbers, reduced by the module itself.
    r".*It is recommended to use .self\.log.* when logging on epoch level in distributed.*",
    r".*isinstance\(treespec, LeafSpec\)` is deprecated.*",
)


def configure_logging(verbose: bool) -> None:
    """Quieten vLLM, Ray, transformers and Lightning, or with ``verbose`` set only lit_rl's own level.

    Args:
        verbose: Show what the libraries print, and lit_rl's debug messages.
    """
    own = logging.getLogger("lit_rl")
    if verbose:
        own.setLevel(logging.DEBUG)
        return
    own.setLevel(logging.INFO)
    for name, value in _QUIET_VARIABLES.items():
        os.environ.setdefault(name, value)
    for name, level in _QUIET_LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    if (transformers := sys.modules.get("transformers")) is not None:
        # It has read the variables above when it was imported, before a configuration was parsed.
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
    for pattern in _QUIET_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(ray|vllm|transformers)(\..*)?$")
