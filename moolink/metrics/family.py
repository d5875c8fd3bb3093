"""The values of a metric, as they are collected."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")

Kind = Literal["counter", "gauge", "histogram"]


class HistogramValue(NamedTuple):
    """Observations by size."""

    bounds: tuple[float, ...]  # upper ones, ascending
    counts: tuple[int, ...]  # of observations in each bucket, and above the last bound
    sum: float

    def plus(self, other: HistogramValue) -> HistogramValue:
        """All observations of two objects, whose bounds are the same."""
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return HistogramValue(self.bounds, counts, self.sum + other.sum)


class Sample(NamedTuple):
    """One value."""

    labels: dict[str, str]
    value: float | HistogramValue


class Family(NamedTuple):
    """All values of one name."""

    name: str
    kind: Kind
    help: str
    samples: list[Sample]


def check_name(name: str) -> None:
    """Raises ValueError unless a metric can have this name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name: a name has letters, digits and underscores")


def check_label(name: str) -> None:
    """Raises ValueError unless a label can have this name."""
    check_name(name)
    if name.startswith("__"):  # Prometheus rejects a whole page that has one
        raise ValueError(f"{name!r}: labels that begin with two underscores are Prometheus' own")


def encodable(text: object) -> str:
    """Returns the text with the characters replaced that UTF-8 cannot encode."""
    return str(text).encode("utf-8", "replace").decode()


def exposed(name: str, kind: Kind) -> set[str]:
    """The names of the family and of its samples in Prometheus' text format."""
    base = name.removesuffix("_total") if kind == "counter" else name
    if kind == "counter":
        return {base, f"{base}_total"}
    if kind == "histogram":
        return {base, *(f"{base}_{part}" for part in ("bucket", "count", "sum"))}
    return {base}
