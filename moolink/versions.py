"""Versions of weights: integers that a program or a peer gives."""

from __future__ import annotations

import operator

_LARGEST = 1 << 62


def version_of(value: int, name: str = "version", least: int = -_LARGEST) -> int:
    """The version as Python's integer; `name` is the argument that it was given as.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    try:
        version = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if not least <= version <= _LARGEST:
        bound = f"at least {least}" if version < least else "at most 2**62"
        raise ValueError(f"{name} must be {bound}, got {version}")
    return version
