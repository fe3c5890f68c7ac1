from __future__ import annotations

import logging
import os

from lit_rl.quiet import configure_logging


def test_quiet_turns_engines_down_but_keeps_what_the_user_has_set(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "debug")

    configure_logging(verbose=False)

    assert os.environ["VLLM_LOGGING_LEVEL"] == "ERROR"
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "debug"
    assert logging.getLogger("lightning.pytorch").level == logging.WARNING


def test_verbose_leaves_the_libraries_alone(monkeypatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)

    configure_logging(verbose=True)

    assert "VLLM_LOGGING_LEVEL" not in os.environ
    assert logging.getLogger("lightning.pytorch").level == logging.INFO
