"""Signals that a process handles. One that it was started to ignore stays ignored.

``nohup`` starts a program with SIGHUP ignored, and a shell without job control a background job
with SIGINT ignored. Code that sets a handler for a signal, or blocks it to wait for it, calls this
module first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable


def not_ignored(signals: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Those of the signals whose disposition is not "ignore"."""
    return tuple(each for each in signals if signal.getsignal(each) is not signal.SIG_IGN)
