"""The rounds of gradients that an accumulator has applied."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moolink.errors import Closed
from moolink.internal import logs
from moolink.metrics.mean_parts import is_part
from moolink.metrics.registry import BOUNDS, Histogram, Registry
from moolink.metrics.sources import Value

if TYPE_CHECKING:
    from moolink._core import AccumulatorCore
    from moolink.group import Group
    from moolink.reports import GradientStats

_KEPT = 64  # rounds
_LONGEST = 400  # characters of the text that says why the leader waits
_SHORT = 10.0  # seconds, at least, in which contributions of a round come, before it is said
_AGAIN = 3  # times as long, until it is said again
PHASES: tuple[Literal["gather", "reduce", "deliver"], ...] = ("gather", "reduce", "deliver")


class Round(NamedTuple):
    """One round, as the broker's page shows it."""

    version: int
    time: float  # Unix time
    seconds: float  # since the round before
    batch_size: int
    skipped: int
    contributors: dict[str, int]  # contributions with gradients, by member
    gather: float | None  # seconds of the phases at this peer, as in RoundPhases
    reduce: float
    deliver: float


class Rounds:
    """Counts the rounds of an accumulator, and keeps the last ones."""

    def __init__(self, core: AccumulatorCore, group: Group, name: str, role: str) -> None:
        self._core = core
        self._role = role
        self._labels = {"group": group.name(), "name": name}
        self._last: collections.deque[Round] = collections.deque(maxlen=_KEPT)
        self._seconds = Histogram(Registry(), BOUNDS)
        self._phases = {phase: Histogram(Registry(), BOUNDS) for phase in PHASES}
        self._before: float | None = None
        self.is_over = False  # the loop has ended, so no contribution is expected
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._counters: dict[str, int] = {}
        self._own: dict[str, int] = {}
        self.totals: Mapping[str, int] = {}  # of the loop: those of the whole job
        self.target: Mapping[str, int] = {}  # of these totals, if the loop has one
        self.are_of_units = False  # whether the accumulator has `units`
        self._virtual_batch_size = 1
        self._contributed = 0  # batch of this peer since the last round
        self._since = 0.0  # time of the first contribution since then
        self._told_after = 0.0  # seconds since that time, after which the leader warned; 0: not yet

    def set_virtual_batch_size(self, size: int) -> None:
        self._virtual_batch_size = size

    def contributed(self, batch_size: int, counters: Mapping[str, int]) -> None:
        """Notes a contribution of this peer. The leader warns if many make no round."""
        _add(self._own, counters)
        if self._contributed == 0:
            self._since = time.monotonic()
        self._contributed += batch_size
        seconds = self._short_for()
        if seconds > _AGAIN * self._told_after and self._core.is_leader():
            self._told_after = seconds
            logs.logger.warning(
                "the virtual batch size is not reached for %.0f s: %s", seconds, self._shortfall()
            )

    def _short_for(self) -> float:
        """Seconds for which contributions have come without a round; 0: not remarkably long."""
        if self._contributed == 0:
            return 0.0
        seconds = time.monotonic() - self._since
        return seconds if seconds > _SHORT and seconds > 3 * self._typical() else 0.0

    def _shortfall(self) -> str:
        if self.are_of_units:
            return "units of data of other members are missing: their loops must contribute them"
        return (
            f"this peer has contributed {self._contributed:,} of {self._virtual_batch_size:,}; if "
            "this is not intended, call set_virtual_batch_size() with less, or contribute larger "
            "batches"
        )

    def _typical(self) -> float:
        return statistics.median(one.seconds for one in self._last) if self._last else 0.0

    def add(self) -> None:
        """Notes the round that was taken from the core just now."""
        stats, now = self._core.stats(), time.monotonic()
        seconds = 0.0 if self._before is None else now - self._before
        if self._before is not None:
            self._seconds.observe(seconds)
        self._before = now
        self._contributed, self._told_after = 0, 0.0
        phases = stats["phase_seconds"]
        for phase, histogram in self._phases.items():
            if (seconds_of := phases[phase]) is not None:
                histogram.observe(seconds_of)
        _add(self._counters, stats["counters"])
        for count, value in zip(_COUNTS, _values(stats), strict=True):
            self._counts[count] += value
        self._last.append(
            Round(
                self._core.model_version(),
                time.time(),
                seconds,
                stats["batch_size"],
                stats["num_skipped"],
                stats["contributions"],
                phases["gather"],
                phases["reduce"],
                phases["deliver"],
            )
        )

    def report(self) -> dict[str, Any] | None:
        """The model's data for the broker's page; None: the accumulator is closed."""
        try:
            stats, leads, last = self._core.stats(), self._core.is_leader(), list(self._last)
            idle, still, awaited = (0.0, 0.0, "") if self.is_over else self._core.activity()
            if not self.is_over and (seconds := self._short_for()):
                still = seconds
                awaited = f"the virtual batch size to be reached: {self._shortfall()}"
            return {
                **self._labels,
                "role": "leader" if leads else self._role,
                "leader": self._core.leader(),
                "version": self._core.model_version(),
                "waiting_for": stats["waiting_for"],
                "idle": idle,
                "still": still,
                "awaited": awaited[:_LONGEST],
                "totals": {k: x for k, x in self.totals.items() if not is_part(k)},
                "target": dict(self.target),
                "typical": self._typical(),
                # Members apply the rounds of the leader, so that its own are enough.
                "rounds": [tuple(one) for one in last] if leads else [],
            }
        except Closed:
            return None

    def _metrics(self) -> Iterator[Value]:
        yield "moolink_model_version", self._labels, self._core.model_version()
        yield "moolink_leader", self._labels, float(self._core.is_leader())
        yield "moolink_round_seconds", self._labels, self._seconds.read()
        for phase, histogram in self._phases.items():
            yield "moolink_round_phase_seconds", {**self._labels, "phase": phase}, histogram.read()
        for name, value in self._counts.items():
            yield name, self._labels, value
        for counter, value in list(self._counters.items()):
            yield "moolink_counter", {**self._labels, "counter": counter}, value
        for counter, value in list(self._own.items()):
            yield "moolink_own_counter", {**self._labels, "counter": counter}, value


_COUNTS = (
    "moolink_rounds_total",
    "moolink_contributions_total",
    "moolink_skipped_contributions_total",
    "moolink_samples_total",
    "moolink_staleness_updates_total",
)


def _add(sums: dict[str, int], counters: Mapping[str, int]) -> None:
    for name, value in counters.items():
        if not is_part(name):
            sums[name] = sums.get(name, 0) + value


def _values(stats: GradientStats) -> tuple[int, ...]:
    gradients, skipped = stats["num_gradients"], stats["num_skipped"]
    return 1, gradients + skipped, skipped, stats["batch_size"], sum(stats["staleness"])
