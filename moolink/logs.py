"""moolink's log goes to Python's ``logging``, under the logger ``"moolink"``."""

from __future__ import annotations

import logging
from typing import Protocol

logger = logging.getLogger("moolink")

_LEVELS = {
    "none": logging.CRITICAL + 10,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.INFO,
    "debug": logging.DEBUG,
}


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
    """Logs what a handler raised that had replied before, of which its caller does not hear."""
    logger.error("the handler of '%s' raised %r after its reply", function, raised, exc_info=raised)


def set_logging(module: _LoggingModule) -> None:
    """Routes the log through a ``logging``-like module (moolib's call)."""
    global logger
    logger = module.getLogger("moolink")
