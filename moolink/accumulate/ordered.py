"""Rounds of exactly one gradient of each unit of data, which are summed in the units' order.

Floating-point sums depend on their order, and the order in which a group adds depends on the number
of its members and on their hosts. So each gradient travels in a row of its own: a bucket has a row
for each unit, and the rows of other members' units are zeros. The group's sum of the buckets then
adds only zeros to a gradient, in any order. Every member adds the rows itself, by one fixed tree.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moolink._core import AccumulatorCore
from moolink.internal import logs

if TYPE_CHECKING:
    from moolink.group import Group
    from moolink.reports import GradientStats

MOST_UNITS = 128  # each is a counter of the round
_PREFIX = "moolink.unit "  # of the counters with a unit's maker and version, see OrderedCore
_WEIGHT = "moolink.weight"  # the counter of the batch sizes
_MAKER_BITS = 31
_VERSION_BITS = 32


def ordered_sum(rows: Any) -> npt.NDArray[Any]:
    """Sums along the first axis by a fixed tree: neighbours first, then the sums of neighbours.

    So the bits depend on the rows and their number alone. To sum values over a group with the same
    bits for any members, give each unit of data a row: every member fills the rows of its own units
    and leaves zeros in the others, ``group.all_reduce`` puts the rows together, and this function
    sums them.

    Args:
        rows: an array of shape ``(n, ...)``, n at least 1; it is not changed.

    Returns:
        An array of shape ``(...)`` and the same dtype, without negative zeros.
    """
    copies = np.array(rows, order="C")  # so that a row is a view of it
    if not copies.ndim or not len(copies):
        raise ValueError("ordered_sum takes at least one row along the first axis")
    add_in_order(list(copies.reshape(len(copies), -1)))
    total: npt.NDArray[Any] = copies[0]
    return total


def add_in_order(rows: Sequence[npt.NDArray[Any]]) -> None:
    """Adds the rows into the first by the tree of ``ordered_sum``; leaves the others undefined."""
    step = 1
    while step < len(rows):
        for i in range(0, len(rows) - step, 2 * step):
            rows[i] += rows[i + step]  # in place
        step *= 2
    # Adding other members' zeros turns -0 into 0. A member alone must have the same bits.
    rows[0] += 0


def owner_of(unit: int, units: int, members: int) -> int:
    """The rank of a unit's owner: neighbours, in shares that differ by at most one unit."""
    return unit * members // units


class OrderedCore(AccumulatorCore):
    """A core whose bucket has a row for each unit. Adapters see a bucket of a single row.

    A member contributes once a round: when it has the gradients of all its units. Until a round
    shows that contribution, it is not asked for these units again. Counters carry, for each unit,
    the id of its maker (the member that computed its gradient) and the version of the parameters.

    Args:
        sections: (dtype, elements) of one gradient.
        units: their number, the same at every member.
    """

    def __init__(
        self,
        group: Group,
        name: str,
        sections: list[tuple[str, int]],
        layout: str,
        observer: bool,
        units: int,
    ) -> None:
        super().__init__(group._core, name, sections * units, f"{layout} units={units}", observer)
        super().set_virtual_batch_size(units)
        self._group, self._units = group, units
        self._places: list[tuple[str, int, int]] = []  # dtype, begin and end in a row, in bytes
        end = 0
        for dtype, count in sections:
            begin = _aligned(end)
            end = begin + count * np.dtype(dtype).itemsize
            self._places.append((dtype, begin, end))
        self._row_bytes, self._stride = end, _aligned(end)
        self._id = 1 + secrets.randbelow(2**_MAKER_BITS - 1)  # in this member's counters
        self._given: dict[int, int] = {}  # batch sizes of the units in the bucket
        self._batch: int | None = None  # of the gradient that is in the bucket and not yet given
        self._counters: dict[str, int] = {}  # of the units in the bucket
        self._offered: set[int] = set()  # units of the contribution that no round has shown
        self._makers: list[int] | None = None  # of each unit in the last round
        self._shown: dict[str, Any] = {}  # about the last round, for its statistics

    def unit(self) -> int | None:
        """The next unit of this member whose gradient is wanted; None: there is none."""
        has = self._given.keys() | self._offered
        return next((unit for unit in self.own_units() if unit not in has), None)

    def own_units(self) -> list[int]:
        """The units of this member."""
        rank, members = self._group._core.rank(), self._group._core.participants()
        if rank is None:
            return []
        return [unit for unit in range(self._units) if owner_of(unit, self._units, members) == rank]

    def wants_gradients(self) -> bool:
        self._batch = None  # of a gradient that was gathered and refused
        if not super().wants_gradients():
            return False
        if self.unit() is not None:
            return True
        if self._given:  # other members have taken the rest over
            self._contribute()
        return False

    def why_not_wanted(self) -> str:
        if super().wants_gradients() and self.unit() is None:
            return "this member has no units of data, or they wait for their round"
        return super().why_not_wanted()

    def bucket(self) -> npt.NDArray[np.uint8]:
        begin = (self.unit() or 0) * self._stride
        return super().bucket()[begin : begin + self._row_bytes]

    def gather(
        self, dtype: str, pieces: Sequence[tuple[object, int, int]], factor: float, clear: bool
    ) -> bool:
        begin = (self.unit() or 0) * self._stride
        self._batch = int(factor)
        moved = [(gradient, count, begin + offset) for gradient, count, offset in pieces]
        return super().gather(dtype, moved, factor, clear)

    def offer(self, batch_size: int, counters: Mapping[str, int]) -> None:
        """After a ``gather``, the gradient is in the round even with a batch size of 0: it is not
        finite, so that no member applies the round."""
        for name, value in counters.items():
            self._counters[name] = self._counters.get(name, 0) + value
        if self._batch is None:
            return  # counters alone: they come with the next gradient
        unit = self.unit()
        assert unit is not None, "no unit's gradient is wanted"
        self._given[unit], self._batch = self._batch, None
        if self.unit() is None:
            self._contribute()

    def _contribute(self) -> None:
        whole, own = super().bucket(), set(self.own_units())
        given = {unit: batch for unit, batch in self._given.items() if unit in own}
        self._given = {}
        if not given:
            return  # the counters come with the next gradient
        counters, self._counters = self._counters, {}
        for unit in set(range(self._units)) - given.keys():
            whole[unit * self._stride :][: self._stride] = 0
        # The version that the round leads to: never 0, so that two stamps add up to no third one.
        stamp = self._id << _VERSION_BITS | (self.model_version() + 1) % 2**_VERSION_BITS
        counters |= {f"{_PREFIX}{unit}": stamp for unit in given}
        counters[_WEIGHT] = sum(given.values())
        super().offer(len(given), counters)
        self._offered |= given.keys()

    def offer_unwritten(self, batch_size: int, counters: Mapping[str, int]) -> None:
        raise RuntimeError(
            "reduce_during_backward() has no fixed order of sums: with units= use "
            "reduce_gradients()"
        )

    def take_result(self) -> npt.NDArray[np.uint8] | None:
        whole = super().take_result()
        if whole is None:
            return None
        stats = super().stats()
        weight, count = stats["counters"].get(_WEIGHT, 0), stats["batch_size"]
        self._shown = {"batch_size": weight, "moved_units": self._check(stats)}
        for dtype, begin, end in self._places:
            starts = range(0, self._units * self._stride, self._stride)
            add_in_order([whole[start + begin : start + end].view(dtype) for start in starts])
        row = whole[: self._row_bytes]
        if weight not in (0, count):  # the core has divided by the number of gradients
            self.scale(row, count / weight)
        return row

    def _check(self, stats: GradientStats) -> list[int]:
        """Records a round. Returns the units that had not exactly one gradient of the newest
        parameters, or that had one of another member than in the round before."""
        version = self.model_version()  # that the round leads to
        if self._group.rpc.get_name() in stats["contributions"]:
            self._offered.clear()
        self._given.clear()
        stamps = [stats["counters"].get(f"{_PREFIX}{unit}", 0) for unit in range(self._units)]
        makers = [stamp >> _VERSION_BITS for stamp in stamps]
        before = self._makers or makers
        self._makers = makers
        moved = [
            unit
            for unit, stamp in enumerate(stamps)
            if stamp % 2**_VERSION_BITS != version % 2**_VERSION_BITS
            or not 0 < makers[unit] < 2**_MAKER_BITS
            or makers[unit] != before[unit]
        ]
        if moved:
            logs.logger.warning(
                "this run is repeatable up to round %d: in round %d the gradients of units %s came "
                "from other members than before, or not exactly once. A run in which the members "
                "do not change is repeatable",
                version - 1,
                version,
                ", ".join(map(str, moved)),
            )
        return moved

    def stats(self) -> GradientStats:
        stats = super().stats()
        stats["counters"] = {
            name: value
            for name, value in stats["counters"].items()
            if not name.startswith(_PREFIX) and name != _WEIGHT
        }
        stats.update(self._shown)  # type: ignore[typeddict-item]
        return stats

    def state_installed(self, number: int) -> None:
        super().state_installed(number)
        self._given.clear()
        self._offered.clear()

    def set_virtual_batch_size(self, size: int) -> None:
        raise ValueError(
            "with units= a round is one contribution of each unit: it has no other size"
        )

    def set_parallel_gradients(self, rounds: int) -> None:
        if rounds != 1:
            raise ValueError(f"with units= one round is under way at once, not {rounds}")


def _aligned(count: int) -> int:
    """As the core aligns sections."""
    return -(-count // 64) * 64
