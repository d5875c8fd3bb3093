"""The function by which writers put items into a queue."""

from __future__ import annotations

from moolink.internal.integers import integer_of

PUT = "moolink.trajectories/{}/put"


def versions_of(begin: int, end: int) -> tuple[int, int]:
    """The versions at the first and last step of an item.

    Raises:
        TypeError, ValueError: they are none, or the last one is below the first.
    """
    begin, end = integer_of(begin, "begin"), integer_of(end, "end")
    if end < begin:
        raise ValueError(f"end, {end}, is below begin, {begin}")
    return begin, end
