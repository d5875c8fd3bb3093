"""Time-outs of one call that waits several times."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from moolink._core import LentSlot
from moolink.internal import logs
from moolink.internal.shown import shown

if TYPE_CHECKING:
    from moolink._core import Future


def after(timeout: float | None) -> float | None:
    """The monotonic time in ``timeout`` seconds; ``None``: never."""
    return None if timeout is None else time.monotonic() + timeout


def left(deadline: float | None) -> float | None:
    """Seconds until the deadline, at least 0; ``None``: no limit."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def check(timeout: float | None) -> None:
    """Raises ValueError unless it is a time limit."""
    try:
        valid = timeout is None or bool(timeout >= 0)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"a time limit must be a number of seconds, not negative: got {shown(timeout)}"
        )


_LINES = (3.0, 10.0, 30.0, 100.0)  # seconds of waiting after which a line is logged
_LATER_LINES = 300.0  # seconds from one later line to the next


class Wait:
    """A wait of several turns, of which the log tells when it takes long.

    Raises:
        ValueError: `timeout` is no time limit.
    """

    def __init__(self, timeout: float | None = None) -> None:
        check(timeout)
        self._begun = time.monotonic()
        self._next_line = self._begun + _LINES[0]
        self._deadline = None if timeout is None else self._begun + timeout

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.left == 0

    @property
    def left(self) -> float | None:
        """Seconds that are left, at least 0; ``None``: no limit."""
        return left(self._deadline)

    def turn(self, why: str) -> float:
        """Seconds for which to wait before this is called again; logs `why` where that is due."""
        now = time.monotonic()
        if now >= self._next_line:
            waited = now - self._begun
            logs.logger.warning("%s (for %.3g s)", why, waited)
            line = next((line for line in _LINES if line > waited), waited + _LATER_LINES)
            self._next_line = self._begun + line
        until_line = self._next_line - now
        left = self.left
        return until_line if left is None else min(left, until_line)

    def for_call(self, call: Future, why: str) -> bool:
        """Waits for the end of a call; returns False if the time is up before it."""
        while not call.wait(self.turn(why)):
            if self.over:
                return False
        return True

    def for_change(self, changed: threading.Condition, why: str) -> None:
        """Waits a turn for a change of the caller's, which holds the condition's lock. If the
        caller is a handler, other handlers run meanwhile."""
        turn = self.turn(why)
        with LentSlot():
            changed.wait(turn)
