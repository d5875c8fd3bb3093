"""Conditions with the library's own lock."""

from __future__ import annotations

import threading

from moolink._core import Lock


def condition(lock: Lock | None = None) -> threading.Condition:
    """A condition of `lock`, or of a new one. While a thread holds it, destructors do not run
    there: see `Lock`."""
    return threading.Condition(Lock() if lock is None else lock)  # type: ignore[arg-type]
