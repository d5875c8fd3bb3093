"""Time-outs of one call that waits several times."""

from __future__ import annotations

import time


def after(timeout: float | None) -> float | None:
    """The monotonic time in ``timeout`` seconds; ``None``: never."""
    return None if timeout is None else time.monotonic() + timeout


def left(deadline: float | None) -> float | None:
    """Seconds until the deadline, at least 0; ``None``: no limit."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
