"""A callback after several others."""

from __future__ import annotations

import itertools
from collections.abc import Callable


def after_all(count: int, callback: Callable[[], object]) -> Callable[[], None]:
    """Returns a function whose call number ``count`` calls ``callback``. For any threads."""
    left = itertools.count(count - 1, -1)

    def one_less() -> None:
        if next(left) == 0:
            callback()

    return one_less
