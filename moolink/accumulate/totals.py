"""The sums of a job's counters, and means that are made of such sums.

The values of a mean travel as counters: their number, and their sum in units of 2**-32. So all
members have the same bits, in whatever order the contributions came.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import SupportsFloat

Means = Mapping[str, SupportsFloat | Iterable[SupportsFloat]]
UNIT = 2.0**-32
_COUNT, _SUM, _NONFINITE = " (count)", " (sum, 2^-32)", " (NaN or infinite)"
_MOST = 2.0**31  # in size, of the values of one contribution: 64 bits hold their sum


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
            for part in (_COUNT, _SUM, _NONFINITE)
        )
        if not count and name + _COUNT not in self:
            self.missed.add(name + _COUNT)
        return total * UNIT / count if count and not nonfinite else math.nan

    def means(self, since: Mapping[str, int] | None = None) -> dict[str, float]:
        """All means, as :meth:`mean` returns them, of those names that have values."""
        names = [key.removesuffix(_COUNT) for key in self if key.endswith(_COUNT)]
        earlier = since or {}
        return {
            name: self.mean(name, since)
            for name in names
            if self[name + _COUNT] > earlier.get(name + _COUNT, 0)
        }

    def counters(self) -> dict[str, int]:
        """The totals without those that are parts of means."""
        parts = (_COUNT, _SUM, _NONFINITE)
        return {name: value for name, value in self.items() if not name.endswith(parts)}


def with_means(counters: Mapping[str, int] | None, means: Means | None) -> Mapping[str, int] | None:
    """The counters of a contribution, with those that its means travel as.

    Raises:
        TypeError: a value is no number.
        ValueError: the values of a mean are too large.
    """
    if not means:
        return counters
    sums = dict(counters or {})
    for name, given in means.items():
        values = _numbers(name, given)
        finite = [value for value in values if math.isfinite(value)]
        if sum(map(abs, finite)) >= _MOST:
            raise ValueError(
                f"the values of the mean {name!r} have a sum of 2**31 or more: give them in a "
                "larger unit"
            )
        sums[name + _COUNT] = len(values)
        sums[name + _SUM] = sum(round(value / UNIT) for value in finite)
        if len(finite) < len(values):
            sums[name + _NONFINITE] = len(values) - len(finite)
    return sums


def _numbers(name: str, given: SupportsFloat | Iterable[SupportsFloat]) -> list[float]:
    try:
        values = list(given)  # type: ignore[arg-type]
    except TypeError:  # one number; arrays without dimensions are no iterables either
        values = [given]  # type: ignore[list-item]
    try:
        # item(): torch warns of float() of a tensor with gradients.
        return [float(v.item() if hasattr(v, "item") else v) for v in values]
    except (TypeError, ValueError):
        raise TypeError(
            f"the mean {name!r} takes a number or an iterable of numbers, not {given!r}"
        ) from None
