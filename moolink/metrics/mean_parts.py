"""The names of the counters as which the values of a mean travel."""

from __future__ import annotations

COUNT, SUM, NONFINITE = " (count)", " (sum, 2^-32)", " (NaN or infinite)"
PARTS = (COUNT, SUM, NONFINITE)


def is_part(counter: str) -> bool:
    """Whether a counter is a part of a mean, which only the mean has a use for."""
    return counter.endswith(PARTS)
