"""Counters, gauges and histograms of the user's own."""

from __future__ import annotations

import abc
import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, SupportsFloat, TypeVar

from moolink._core import Lock
from moolink.internal import forks
from moolink.metrics.family import (
    Family,
    HistogramValue,
    Kind,
    Sample,
    check_label,
    check_name,
    encodable,
    exposed,
)

_RESERVED = ("moolink_", "process_")  # how the names of moolink's own metrics begin
_RESERVED_LABELS = ("le", "peer")  # Prometheus' own, and the broker's
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Instrument(abc.ABC):
    """A value that the program changes and others read."""

    kind: ClassVar[Kind]

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @abc.abstractmethod
    def read(self) -> float | HistogramValue:
        """The value."""


class _Number(Instrument):
    """One number."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self._value = 0.0

    def _add(self, amount: float) -> None:
        with self._registry.lock:
            self._value += amount

    def read(self) -> float:
        """The value."""
        return self._value


class Counter(_Number):
    """A sum that only grows."""

    kind = "counter"

    def inc(self, amount: SupportsFloat = 1.0) -> None:
        """Adds `amount`.

        Raises:
            ValueError: `amount` is negative or NaN.
        """
        amount = float(amount)
        if not amount >= 0:
            raise ValueError(f"a counter only grows, got {amount}")
        self._add(amount)


class Gauge(_Number):
    """A value that goes up and down."""

    kind = "gauge"

    def set(self, value: SupportsFloat) -> None:
        """Sets the value."""
        number = float(value)
        with self._registry.lock:
            self._value = number

    def inc(self, amount: SupportsFloat = 1.0) -> None:
        """Adds `amount`, which may be negative."""
        self._add(float(amount))


class Histogram(Instrument):
    """Counts of observations by size, and their sum."""

    kind = "histogram"

    def __init__(self, registry: Registry, bounds: Sequence[float]) -> None:
        super().__init__(registry)
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: SupportsFloat) -> None:
        """Adds an observation. NaN counts above the last bound, and is not added to the sum."""
        number = float(value)
        size, added = (math.inf, 0.0) if math.isnan(number) else (number, number)
        with self._registry.lock:
            self._counts[bisect.bisect_left(self.bounds, size)] += 1
            self._sum += added

    def read(self) -> HistogramValue:
        """The number of observations in each bucket and above the last bound, and their sum."""
        with self._registry.lock:
            return HistogramValue(self.bounds, tuple(self._counts), self._sum)


I = TypeVar("I", bound=Instrument)  # noqa: E741
Labels = tuple[tuple[str, str], ...]


class _Named:
    """The instruments of one name, by their labels."""

    def __init__(self, kind: Kind, help: str) -> None:
        self.kind = kind
        self.help = help
        self.by_labels: dict[Labels, Instrument] = {}


class Registry:
    """The instruments of a process, made at first use."""

    def __init__(self) -> None:
        self._named: dict[str, _Named] = {}
        self._found: dict[tuple[type[Instrument], str, tuple[object, ...]], Instrument] = {}
        self._forked()
        forks.changes_in_children(self)

    def counter(self, name: str, help: str, labels: Mapping[str, str]) -> Counter:
        """See :func:`moolink.metrics.counter`."""
        return self._get(Counter, lambda: Counter(self), name, help, labels)

    def gauge(self, name: str, help: str, labels: Mapping[str, str]) -> Gauge:
        """See :func:`moolink.metrics.gauge`."""
        return self._get(Gauge, lambda: Gauge(self), name, help, labels)

    def histogram(
        self, name: str, help: str, labels: Mapping[str, str], bounds: Sequence[float] | None
    ) -> Histogram:
        """See :func:`moolink.metrics.histogram`."""
        if bounds is None:
            return self._get(Histogram, lambda: Histogram(self, BOUNDS), name, help, labels)
        upper = _bounds(bounds)
        found = self._get(Histogram, lambda: Histogram(self, upper), name, help, labels)
        if found.bounds != upper:
            raise ValueError(f"{name!r} has the bounds {found.bounds}, not {upper}")
        return found

    def families(self) -> list[Family]:
        """All values, by name."""
        with self.lock:
            named = [
                (name, one.kind, one.help, list(one.by_labels.items()))
                for name, one in self._named.items()
            ]
        return [
            Family(name, kind, help, [Sample(dict(labels), one.read()) for labels, one in all_of])
            for name, kind, help, all_of in named
        ]

    def _get(
        self, kind: type[I], make: Callable[[], I], name: str, help: str, labels: Mapping[str, str]
    ) -> I:
        # The fast path of most calls: the same labels in the same order.
        given = kind, name, tuple(labels.items())
        plain = all(type(value) is str for value in labels.values())
        if plain and isinstance(known := self._found.get(given), kind):
            return known
        _check_names(name, labels)
        key = tuple(sorted((label, encodable(value)) for label, value in labels.items()))
        with self.lock:
            named = self._named.get(name)
            if named is None:
                self._require_free(name, kind.kind)
                named = self._named[name] = _Named(kind.kind, encodable(help))
            found = named.by_labels.get(key)
            if found is None and named.kind == kind.kind:
                found = named.by_labels[key] = make()
            if not isinstance(found, kind):
                raise ValueError(f"{name!r} is a {named.kind}, and no {kind.kind}")
            if plain:
                self._found[given] = found
            return found

    def _require_free(self, name: str, kind: Kind) -> None:
        for other, named in self._named.items():
            if common := exposed(name, kind) & exposed(other, named.kind):
                raise ValueError(f"{name!r} and {other!r} would both be {max(common)!r}")

    def _forked(self) -> None:
        # A signal handler or a finalizer may also count while its thread holds the lock.
        self.lock = Lock()


def _bounds(given: Sequence[float]) -> tuple[float, ...]:
    """The bounds as floats, without the infinite bound, which every histogram has."""
    bounds = tuple(float(bound) for bound in given)
    if bounds and bounds[-1] == math.inf:
        bounds = bounds[:-1]
    if not bounds or any(not low < high for low, high in itertools.pairwise(bounds)):
        raise ValueError(f"bounds must ascend, got {list(bounds)}")
    if not all(math.isfinite(bound) for bound in bounds):
        raise ValueError(f"bounds must be finite, got {list(bounds)}")
    return bounds


def _check_names(name: str, labels: Mapping[str, str]) -> None:
    if name.startswith(_RESERVED):
        raise ValueError(f"{name!r}: names that begin with moolink_ or process_ are moolink's own")
    if reserved := labels.keys() & _RESERVED_LABELS:
        raise ValueError(f"{reserved.pop()!r} is a label that is set by others")
    check_name(name)
    for label in labels:
        check_label(label)
