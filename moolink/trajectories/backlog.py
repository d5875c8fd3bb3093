"""The items that wait for a learner, with their ages: a machine without I/O.

Its rules: docs/design/protocol/trajectories.md.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass
class Item(Generic[T]):
    """An item with the versions of the weights at its first and last step, and the learner's
    version when it was put."""

    payload: T
    begin: int
    end: int
    arrived: int


@dataclasses.dataclass
class Counts:
    """Since the beginning; sums of versions over the items that were taken."""

    put: int = 0
    taken: int = 0
    dropped: int = 0
    withdrawn: int = 0
    lag_acting: int = 0
    lag_in_flight: int = 0
    lag_in_queue: int = 0
    largest_lag: int = 0


class Backlog(Generic[T]):
    """Items in the order in which they were put. At most `max_size` are in it; others wait in line,
    with their writers."""

    def __init__(self, max_size: int) -> None:
        self.version = 0
        self.counts = Counts()
        self._max_size = max_size
        self._items: collections.deque[Item[T]] = collections.deque()
        self._line: collections.deque[Item[T]] = collections.deque()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def in_line(self) -> int:
        """Items that wait for room."""
        return len(self._line)

    def advance(self, version: int) -> None:
        """The learner's weights are of this version now.

        Raises:
            ValueError: it is below the one before.
        """
        if version < self.version:
            raise ValueError(f"version {version} is below the one before, {self.version}")
        self.version = version

    def put(self, payload: T, begin: int, end: int) -> bool:
        """An item has come; returns whether there is room for it. If not, it is in line."""
        self.counts.put += 1
        item = Item(payload, begin, end, self.version)
        if len(self._items) < self._max_size:
            self._items.append(item)
            return True
        self._line.append(item)
        return False

    def withdraw(self, payload: T) -> bool:
        """The writer of an item has given up; returns whether the item was in line."""
        for item in self._line:
            if item.payload is payload:
                self._line.remove(item)
                self.counts.withdrawn += 1
                return True
        return False

    def withdraw_all(self) -> list[T]:
        """Empties the line and returns its payloads."""
        line = [item.payload for item in self._line]
        self._line.clear()
        self.counts.withdrawn += len(line)
        return line

    def expire(self, max_lag: int) -> list[Item[T]]:
        """Drops items begun more than `max_lag` versions ago; returns those that were in line."""
        line = [item for item in self._line if self.lag(item) > max_lag]
        kept = [item for item in self._items if self.lag(item) <= max_lag]
        self.counts.dropped += len(line) + len(self._items) - len(kept)
        self._items = collections.deque(kept)
        self._line = collections.deque(i for i in self._line if self.lag(i) <= max_lag)
        return line

    def take(self, count: int) -> list[Item[T]]:
        """Takes up to `count` items, the oldest first."""
        taken = [self._items.popleft() for _ in range(min(count, len(self._items)))]
        for item in taken:
            self._count(item)
        return taken

    def lag(self, item: Item[T]) -> int:
        """Versions that the learner's weights are ahead of the item's first step."""
        return self.version - item.begin

    def admit(self) -> list[Item[T]]:
        """Moves items from the line while there is room; returns them."""
        admitted: list[Item[T]] = []
        while self._line and len(self._items) < self._max_size:
            self._items.append(self._line.popleft())
            admitted.append(self._items[-1])
        return admitted

    def _count(self, item: Item[T]) -> None:
        counts = self.counts
        counts.taken += 1
        counts.lag_acting += max(0, item.end - item.begin)
        counts.lag_in_flight += max(0, item.arrived - item.end)
        counts.lag_in_queue += self.version - item.arrived
        counts.largest_lag = max(counts.largest_lag, self.lag(item))
