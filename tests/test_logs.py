"""Where the log goes."""

from __future__ import annotations

import logging

import pytest

import moolink
from moolink import accumulator, logs, parameter_sync, training_steps
from moolink.env_pool import supervisor


class Elsewhere:
    """A module like `logging` whose loggers are others."""

    def getLogger(self, name: str | None = None) -> logging.Logger:
        return logging.getLogger(f"elsewhere.{name}")


def test_set_logging_reaches_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "logger", logs.logger)
    moolink.set_logging(Elsewhere())
    for module in (accumulator, parameter_sync, training_steps, supervisor):
        assert module.logs.logger.name == "elsewhere.moolink"
        assert not hasattr(module, "logger")
