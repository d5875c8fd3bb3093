"""What queues and writers have in common: the function that puts items, and versions."""

from __future__ import annotations

import operator

PUT = "moolink.trajectories/{}/put"
_LARGEST = 1 << 62


def version_of(name: str, value: int) -> int:
    """A version of weights, as Python's integer.

    Raises:
        TypeError: it is no integer.
        ValueError: it is too large.
    """
    try:
        version = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if abs(version) > _LARGEST:
        raise ValueError(f"{name} must be at most 2**62, got {version}")
    return version


def versions_of(begin: int, end: int) -> tuple[int, int]:
    """The versions at the first and last step of an item.

    Raises:
        TypeError, ValueError: they are none, or the last one is below the first.
    """
    begin, end = version_of("begin", begin), version_of("end", end)
    if end < begin:
        raise ValueError(f"end, {end}, is below begin, {begin}")
    return begin, end
