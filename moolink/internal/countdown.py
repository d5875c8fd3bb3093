"""A callback after several others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable


def after_all(count: int, callback: Callable[[], object]) -> Callable[[], None]:
    """Returns a function whose call number ``count`` calls ``callback``. For any threads."""
    left = itertools.count(count - 1, -1)
    lock = threading.Lock()

    def one_less() -> None:
        with lock:
            last = next(left) == 0
        if last:
            callback()

    return one_less
