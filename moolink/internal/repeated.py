"""Warnings that are repeated while a problem lasts."""

from __future__ import annotations

import time

from moolink.internal import logs

_FIRST, _LONGEST = 3.0, 300.0  # seconds between two warnings


class Repeated:
    """Logs a warning at once, and again after 3, 9, 27 s and so on while `warn` is called."""

    def __init__(self) -> None:
        self._next, self._pause = 0.0, _FIRST

    def warn(self, text: str) -> None:
        """Logs the warning, unless the pause since the last one has not passed."""
        now = time.monotonic()
        if now < self._next:
            return
        logs.logger.warning(text)
        self._next, self._pause = now + self._pause, min(3 * self._pause, _LONGEST)
