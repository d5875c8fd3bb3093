"""The options of a table: selectors, limiters, sizes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, SupportsFloat

from moolink.internal.integers import integer_of

_NO_BOUND = sys.float_info.max
_LARGEST = (1 << 32) - 1


@dataclasses.dataclass(frozen=True)
class Selector:
    """Chooses among a table's items: which to sample, or which to remove."""

    @property
    def arguments(self) -> tuple[str, float]:
        """Its name and exponent in the core."""
        name = type(self).__name__
        words = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
        return words.removeprefix("_"), getattr(self, "exponent", 1.0)


@dataclasses.dataclass(frozen=True)
class Uniform(Selector):
    """Any item, with equal probability."""


@dataclasses.dataclass(frozen=True)
class Prioritized(Selector):
    """An item with a probability in proportion to priority ** exponent. Items of priority 0 are
    not chosen, unless all are."""

    exponent: float = 1.0

    def __post_init__(self) -> None:
        _require_number("exponent", self.exponent)
        if not 0 <= self.exponent < float("inf"):
            raise ValueError(f"an exponent must not be negative, got {self.exponent}")


@dataclasses.dataclass(frozen=True)
class Fifo(Selector):
    """The oldest item."""


@dataclasses.dataclass(frozen=True)
class Lifo(Selector):
    """The newest item."""


@dataclasses.dataclass(frozen=True)
class MinHeap(Selector):
    """The item of the lowest priority; of equal ones that whose priority was set first."""


@dataclasses.dataclass(frozen=True)
class MaxHeap(Selector):
    """The item of the highest priority; of equal ones that whose priority was set first."""


@dataclasses.dataclass(frozen=True)
class Limiter:
    """When items may be inserted and sampled. With error = inserts * samples_per_insert - samples,
    an insert must leave the error at or below `max_diff`, a sample at or above `min_diff`. Below
    `min_size` items nothing is sampled, and inserts are free."""

    samples_per_insert: float = 1.0
    min_size: int = 1
    min_diff: float = -_NO_BOUND
    max_diff: float = _NO_BOUND

    def __post_init__(self) -> None:
        integer_of(self.min_size, "min_size", least=1)
        for bound in ("samples_per_insert", "min_diff", "max_diff"):
            _require_number(bound, getattr(self, bound))
        if not 0 < self.samples_per_insert < float("inf"):
            raise ValueError(f"samples_per_insert must be positive, got {self.samples_per_insert}")


def MinSize(min_size: int) -> Limiter:
    """Nothing is sampled before there are `min_size` items."""
    return Limiter(min_size=min_size)


def SampleToInsertRatio(samples_per_insert: float, min_size: int, error_buffer: float) -> Limiter:
    """Keeps inserts and samples in step: (inserts - min_size) * samples_per_insert - samples stays
    between -error_buffer, where samples wait, and error_buffer, where inserts wait. Below
    `min_size` items inserts are free, and samples wait.

    Raises:
        ValueError: `error_buffer` is below max(1, samples_per_insert), which could stop both.
    """
    integer_of(min_size, "min_size", least=1)
    _require_number("samples_per_insert", samples_per_insert)
    _require_number("error_buffer", error_buffer)
    least = max(1.0, samples_per_insert)
    if not error_buffer >= least:  # so that NaN fails, too
        raise ValueError(
            f"error_buffer must be at least max(1, samples_per_insert) = {least:g}, got "
            f"{error_buffer:g}: inserts and samples could wait for each other"
        )
    offset = samples_per_insert * min_size
    return Limiter(samples_per_insert, min_size, offset - error_buffer, offset + error_buffer)


def _require_number(name: str, value: Any) -> None:
    if not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, got {value!r}")


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a :class:`moolink.Replay`.

    Args:
        name: its name.
        max_size: the most items that it has, from 1 to 2**32 - 1.
        sampler: which items are sampled.
        remover: which item makes room in a full table. None: an insert waits until items were
            sampled `max_times_sampled` times, or removed.
        limiter: when items may be inserted and sampled.
        max_times_sampled: an item is removed once it has been sampled this often; 0: never.

    Raises:
        TypeError: an option is of another type.
        ValueError: an option is out of range, or nothing could ever be sampled.
    """

    name: str
    max_size: int
    sampler: Selector = Uniform()
    remover: Selector | None = Fifo()
    limiter: Limiter = Limiter()
    max_times_sampled: int = 0

    def __post_init__(self) -> None:
        self._check_types()
        if not 1 <= self.max_size <= _LARGEST:
            raise ValueError(f"max_size must be from 1 to 2**32 - 1, got {self.max_size}")
        if not 0 <= self.max_times_sampled <= _LARGEST:
            raise ValueError(f"max_times_sampled must not be negative: {self.max_times_sampled}")
        if self.limiter.min_size > self.max_size:
            raise ValueError(
                f"table {self.name!r} has at most {self.max_size} items, and its limiter waits for "
                f"{self.limiter.min_size}: nothing would ever be sampled"
            )

    def _check_types(self) -> None:
        expected: dict[str, tuple[Any, str]] = {
            "name": (str, "a str"),
            "max_size": (int, "an int"),
            "sampler": (Selector, "a Selector, such as Uniform()"),
            "remover": (Selector | None, "a Selector or None, such as Fifo()"),
            "limiter": (Limiter, "a Limiter, such as MinSize(1)"),
            "max_times_sampled": (int, "an int"),
        }
        for option, (kind, text) in expected.items():
            given = getattr(self, option)
            if not isinstance(given, kind):
                raise TypeError(f"{option} of table {self.name!r} must be {text}, got {given!r}")

    @classmethod
    def queue(cls, name: str, max_size: int) -> Table:
        """Each item is sampled once, the oldest first; inserts wait while `max_size` items do."""
        limiter = Limiter(1.0, 1, 0.0, float(max_size))
        return cls(name, max_size, Fifo(), Fifo(), limiter, max_times_sampled=1)

    @classmethod
    def stack(cls, name: str, max_size: int) -> Table:
        """Each item is sampled once, the newest first; inserts wait while `max_size` items do."""
        limiter = Limiter(1.0, 1, 0.0, float(max_size))
        return cls(name, max_size, Lifo(), Lifo(), limiter, max_times_sampled=1)

    def describe(self) -> dict[str, Any]:
        """The options as plain values, which a checkpoint keeps and compares, and clients get."""
        limiter = self.limiter
        return {
            "name": self.name,
            "max_size": self.max_size,
            "sampler": list(self.sampler.arguments),
            "remover": None if self.remover is None else list(self.remover.arguments),
            "limiter": [
                limiter.samples_per_insert,
                limiter.min_size,
                limiter.min_diff,
                limiter.max_diff,
            ],
            "max_times_sampled": self.max_times_sampled,
        }

    @classmethod
    def described(cls, options: Mapping[str, Any]) -> Table:
        """The table that :meth:`describe` has described so."""
        remover = options["remover"]
        return cls(
            options["name"],
            options["max_size"],
            _described_selector(*options["sampler"]),
            None if remover is None else _described_selector(*remover),
            Limiter(*options["limiter"]),
            options["max_times_sampled"],
        )


def _described_selector(name: str, exponent: float) -> Selector:
    selectors = (Uniform(), Prioritized(exponent), Fifo(), Lifo(), MinHeap(), MaxHeap())
    for selector in selectors:
        if selector.arguments[0] == name:
            return selector
    raise ValueError(f"there is no selector {name!r}")
