"""Checks of the arguments that users give to accumulators."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from moolink.internal.integers import integer_of

LARGEST_BATCH = 2**40  # sums of many fit 64 bits
MOST_COUNTERS = 256
LONGEST_NAME = 256  # bytes of a counter's name


def require_one_of(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}, not {value!r}")


def checked_batch_size(batch_size: int) -> int:
    return integer_of(batch_size, "batch_size", 1, LARGEST_BATCH)


def checked_counters(counters: Mapping[str, int] | None) -> dict[str, int]:
    checked: dict[str, int] = {}
    counters = counters or {}
    if len(counters) > MOST_COUNTERS:
        raise ValueError(
            f"a contribution has at most {MOST_COUNTERS} counters, not {len(counters)}"
        )
    for name, value in counters.items():
        if not isinstance(name, str):
            raise TypeError(f"a counter's name must be a string, not {name!r}")
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(
                f"a counter's name has at most {LONGEST_NAME} bytes: {name[:40]!r}... has more"
            )
        try:
            checked[name] = operator.index(value)
        except TypeError:
            raise TypeError(
                f"counter {name!r} must be an integer, for it is summed exactly, not {value!r}"
            ) from None
        if not -(2**63) <= checked[name] < 2**63:
            raise ValueError(f"counter {name!r} needs more than 64 bits: {value}")
    return checked
