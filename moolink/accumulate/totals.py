"""The sums of a job's counters, and means that are made of such sums.

The values of a mean travel as counters: their number, and their sum in units of 2**-32. So all
members have the same bits, in whatever order the contributions came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

from moolink.internal.floats import float_of
from moolink.metrics.mean_parts import COUNT, NONFINITE, PARTS, SUM, is_part

Means = Mapping[str, SupportsFloat | Iterable[SupportsFloat]]
_BITS = 32  # after the point, of the values of means
_UNIT = 2.0**-_BITS
_MOST = 2**63  # in these units, of the sizes of one contribution's values: 64 bits hold their sum


class Totals(dict[str, int]):
    """Sums of counters over all rounds of a job, equal at every member. A counter that no round
    had is 0."""

    def __init__(self, sums: Mapping[str, int] | None = None) -> None:
        super().__init__({} if sums is None else sums)
        self.missed: set[str] = set()
        """Names of counters that were asked for, and that no round had."""

    def __missing__(self, name: str) -> int:
        self.missed.add(name)
        return 0

    def mean(self, name: str, since: Mapping[str, int] | None = None) -> float:
        """The mean of the values that contributions gave as ``means={name: ...}``.

        Args:
            name: of the mean.
            since: earlier totals of the job, such as ``step.totals`` of an earlier turn: the mean
                of the values that came after them. None: of all.

        Returns:
            The exact mean, rounded once, of the values, each of which was rounded to a multiple of
            2**-32; NaN if there are none, or one of them is NaN or infinite.
        """
        count, total, nonfinite = (
            self.get(name + part, 0) - (since or {}).get(name + part, 0)
            for part in (COUNT, SUM, NONFINITE)
        )
        if not count and name + COUNT not in self:
            self.missed.add(name + COUNT)
        return total / (count << _BITS) if count and not nonfinite else math.nan

    def means(self, since: Mapping[str, int] | None = None) -> dict[str, float]:
        """All means, as :meth:`mean` returns them, of those names that have values."""
        names = [key.removesuffix(COUNT) for key in self if key.endswith(COUNT)]
        earlier = since or {}
        return {
            name: self.mean(name, since)
            for name in names
            if self[name + COUNT] > earlier.get(name + COUNT, 0)
        }

    def counters(self) -> dict[str, int]:
        """The totals without those that are parts of means."""
        return {name: value for name, value in self.items() if not is_part(name)}


def with_means(counters: Mapping[str, int] | None, means: Means | None) -> Mapping[str, int] | None:
    """The counters of a contribution, with those that its means travel as.

    Raises:
        TypeError: a value is no number.
        ValueError: the values of a mean are too large, or a counter has a name such as those that
            means travel as.
    """
    for name in counters or ():
        if isinstance(name, str) and is_part(name):
            raise ValueError(
                f"the counter {name!r} needs another name: those that end in "
                f"{', '.join(map(repr, PARTS))} are parts of means"
            )
    if not means:
        return counters
    sums = dict(counters or {})
    for name, given in means.items():
        values = _numbers(name, given)
        finite = [round(value / _UNIT) for value in values if math.isfinite(value)]
        if sum(map(abs, finite)) >= _MOST:
            raise ValueError(
                f"the values of the mean {name!r} have a sum of 2**31 or more: give them in a "
                "larger unit"
            )
        sums[name + COUNT] = len(values)
        sums[name + SUM] = sum(finite)
        if len(finite) < len(values):
            sums[name + NONFINITE] = len(values) - len(finite)
    return sums


def _numbers(name: str, given: SupportsFloat | Iterable[SupportsFloat]) -> list[float]:
    values: list[Any]
    try:
        values = [given] if isinstance(given, str) else list(given)  # type: ignore[arg-type]
    except TypeError:  # one number; arrays without dimensions are no iterables either
        values = [given]
    try:
        return [_number(value) for value in values]
    except (TypeError, ValueError, RuntimeError):  # torch's, of an array of several elements
        raise TypeError(
            f"the mean {name!r} takes a number or an iterable of numbers, not {given!r}"
        ) from None


def _number(value: SupportsFloat) -> float:
    if isinstance(value, str | bytes):
        raise TypeError("a text")
    return float_of(value)
