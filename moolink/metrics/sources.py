"""moolink's own objects, whose values are read when metrics are collected."""

from __future__ import annotations

import os
import resource
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from moolink._core import Lock
from moolink.errors import Closed
from moolink.internal import forks
from moolink.metrics.family import Family, HistogramValue, Sample
from moolink.metrics.table import BY_NAME

if TYPE_CHECKING:
    from moolink.rpc import Rpc

Labels = dict[str, str]
Value = tuple[str, Labels, float | HistogramValue]
"""The name of a metric of moolink.metrics.table, its labels, and a value."""


class Source(Protocol):
    """An object that has metrics."""

    def _metrics(self) -> Iterable[Value]:
        """Reads its values. A closed object has none, or raises Closed."""


class Sources:
    """The sources of a process, which are kept for as long as others refer to them."""

    def __init__(self) -> None:
        self._peers: weakref.WeakKeyDictionary[Source, weakref.ref[Rpc] | None] = (
            weakref.WeakKeyDictionary()
        )
        self._forked()
        forks.changes_in_children(self)

    def add(self, source: Source, rpc: Rpc | None = None) -> None:
        """Adds a source, which belongs to `rpc`, or to the process."""
        with self._lock:
            self._peers[source] = None if rpc is None else weakref.ref(rpc)

    def remove(self, source: Source) -> None:
        """Removes a source, which is closed."""
        with self._lock:
            self._peers.pop(source, None)

    def of(self, rpc: Rpc | None) -> list[Source]:
        """The sources of the process and of a peer; None: of all its peers."""
        with self._lock:
            sources = self._all()
        return [source for source, peer in sources if rpc is None or peer is None or peer() is rpc]

    def families(self, rpc: Rpc | None = None) -> list[Family]:
        """Reads the sources of the process, and of its peers or of one of them.

        Of several objects with the same labels, counters and histograms are added, and the largest
        value of a gauge counts.
        """
        found: dict[str, dict[tuple[tuple[str, str], ...], Sample]] = {}
        for value in _process():
            _add(found, value)
        for source in self.of(rpc):
            for value in _read(source):
                _add(found, value)
        return [
            Family(name, BY_NAME[name].kind, BY_NAME[name].help, list(samples.values()))
            for name, samples in found.items()
        ]

    def _all(self) -> list[tuple[Source, weakref.ref[Rpc] | None]]:
        while True:
            try:
                return list(self._peers.items())
            except RuntimeError:  # a finalizer has removed its object meanwhile
                continue

    def _forked(self) -> None:
        # The collector may run in a thread that holds the lock, and close an object, which locks
        # again.
        self._lock = Lock()


def _read(source: Source) -> list[Value]:
    try:
        return list(source._metrics())
    except Closed:
        return []


def _add(found: dict[str, dict[tuple[tuple[str, str], ...], Sample]], given: Value) -> None:
    name, labels, value = given
    key = tuple(labels.items())
    samples = found.setdefault(name, {})
    before = samples.get(key)
    if before is not None:
        if isinstance(value, HistogramValue):
            assert isinstance(before.value, HistogramValue)
            value = before.value.plus(value)
        else:
            assert not isinstance(before.value, HistogramValue)
            counts = BY_NAME[name].kind == "counter"
            value = before.value + value if counts else max(before.value, value)
    samples[key] = Sample(labels, value)


def _process() -> Iterator[Value]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield "process_cpu_seconds_total", {}, usage.ru_utime + usage.ru_stime
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    ticks, pages = int(fields[19]), int(fields[21])
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    yield "process_start_time_seconds", {}, boot + ticks / os.sysconf("SC_CLK_TCK")
    yield "process_resident_memory_bytes", {}, float(pages * os.sysconf("SC_PAGE_SIZE"))
