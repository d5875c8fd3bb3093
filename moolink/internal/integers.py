"""Integers that a program or a peer gives: versions, counts."""

from __future__ import annotations

import operator

from moolink.internal.shown import shown

_LARGEST = 1 << 62


def integer_of(value: int, name: str, least: int = -_LARGEST, most: int = _LARGEST) -> int:
    """The value as Python's integer; `name` is the argument that it was given as.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    try:
        integer = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)}") from None
    if not least <= integer <= most:
        is_power = most >= 1 << 20 and most & (most - 1) == 0
        largest = f"2**{most.bit_length() - 1}" if is_power else most
        bound = f"at least {least}" if integer < least else f"at most {largest}"
        raise ValueError(f"{name} must be {bound}, got {shown(integer)}")
    return integer
