"""Leaving a job when a scheduler ends the process."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from moolink.internal.signals import not_ignored

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def leave_on_signals(*signals: signal.Signals) -> None:
    """Makes these signals end the program as `sys.exit()` does, in place of at once.

    Schedulers send SIGTERM to a process before they kill it, for example because another job takes
    its machine. By default it ends the process without a word, and members on other hosts wait for
    it until they evict it (3 s). After this call the main thread raises SystemExit with the status
    128 + the signal's number: `with` blocks are left, peers are closed, and the others go on at
    once. Signals that come later are ignored: Slurm sends SIGTERM more than once. A signal that the
    process ignores already stays ignored.

    Args:
        signals: SIGTERM and SIGUSR1 if none are given.

    Raises:
        ValueError: this is not the main thread.
    """
    leaving = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal leaving
        if not leaving:
            leaving = True
            sys.exit(128 + number)

    for each in not_ignored(signals or _SIGNALS):
        signal.signal(each, leave)
