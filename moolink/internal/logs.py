"""moolink's log goes to Python's ``logging``, under the logger ``"moolink"``.

A program that configures no logging gets it on standard error: time, level, process, text.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Protocol

logger = logging.getLogger("moolink")  # use it as logs.logger: set_logging() replaces it

_LEVELS = {
    "none": logging.CRITICAL + 10,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.INFO,
    "debug": logging.DEBUG,
}


class _Lines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        moment = time.localtime(record.created)
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", moment)
        return f"{seconds}.{int(record.msecs):03}{time.strftime('%z', moment)}"


class _Default(logging.Handler):
    """Takes the place of :data:`logging.lastResort`, whose lines have neither time nor level."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Lines("%(asctime)s %(levelname)s moolink[%(process)d] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        # Looked at for each line: a program may configure its logging at any time.
        own = logging.getLogger("moolink")
        if (
            sys.stderr is None
            or len(own.handlers) > 1
            or (own.propagate and logging.getLogger().handlers)
        ):
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 - as every handler does: the program goes on
            self.handleError(record)


logger.addHandler(_Default())


class _LoggingModule(Protocol):
    def getLogger(self, name: str | None = None) -> logging.Logger: ...


def set_log_level(level: str | int) -> None:
    """Sets the least level that is logged.

    Args:
        level: ``"none"``, ``"error"``, ``"warning"``, ``"info"``, ``"verbose"`` (moolib's name,
            the same as ``"info"``), ``"debug"``, or a number as in :mod:`logging`.

    Raises:
        ValueError: the name is none of these.
    """
    if isinstance(level, str):
        try:
            level = _LEVELS[level.lower()]
        except KeyError:
            raise ValueError(f"log level {level!r} is none of {', '.join(_LEVELS)}") from None
    logger.setLevel(level)


def raised_after_reply(function: str, raised: BaseException) -> None:
    """Logs an exception that a handler raised after its reply; its caller does not receive it."""
    logger.error("the handler of '%s' raised %r after its reply", function, raised, exc_info=raised)


def set_logging(module: _LoggingModule) -> None:
    """Routes the log through a ``logging``-like module (moolib's call)."""
    global logger
    logger = module.getLogger("moolink")
