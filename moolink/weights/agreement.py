"""Machines without I/O that choose the version of a sharded tree: publishers and subscriber agree.

docs/design/protocol/publication.md has their rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_LARGEST_LEAD = 1 << 20


class Holds:
    """The publisher's side: at most one version kept for each sharded subscriber.

    The publisher has offered this version to the subscriber, or will offer it.
    """

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    @property
    def versions(self) -> set[int]:
        """The versions that are kept."""
        return set(self._held.values())

    def asked(self, subscriber: str, above: int, newest: int | None) -> None:
        """A subscriber asks for a version above `above`."""
        if self._held.get(subscriber, above) <= above:
            self._held.pop(subscriber, None)
        if newest is not None and newest > above:
            self._held.setdefault(subscriber, newest)

    def published(self, version: int, waiting: Iterable[tuple[str, int]]) -> None:
        """A version was published while some subscribers waited, each for one above a number."""
        for subscriber, above in waiting:
            if version > above:
                self._held.setdefault(subscriber, version)

    def offer(self, subscriber: str, above: int, newest: int) -> int:
        """The version to offer: the one kept for the subscriber, else the newest."""
        held = self._held.get(subscriber, above)
        return held if held > above else newest

    def forget(self, alive: Iterable[str]) -> None:
        """Drops the versions kept for subscribers that are not alive."""
        for subscriber in self._held.keys() - set(alive):
            del self._held[subscriber]


class Agreement:
    """The subscriber's side: it asks all publishers for a version above `above`.

    It takes the lowest version that they offer. A publisher that offers a later version may no
    longer have the lowest. Then the subscriber asks all publishers for the latest version offered.
    If some have passed that version by then, it asks for a version further ahead: each publisher
    that has not reached this version keeps it when it does.
    """

    def __init__(self) -> None:
        self.above = -1
        self._has = -1
        self._lead = 0  # versions asked for ahead of the latest one

    @property
    def asks_for_a_later_one(self) -> bool:
        """Whether publishers might stop before they reach the version asked for: see `late`."""
        return self.above > self._has

    def took(self, version: int) -> None:
        """The subscriber has a version from all publishers."""
        self._has = self.above = version
        self._lead //= 2

    def missed(self, offers: Sequence[int]) -> None:
        """A publisher no longer has the lowest of the versions that were offered."""
        latest = max(offers) - 1
        if self.asks_for_a_later_one:
            self._lead = min(max(1, 2 * self._lead), _LARGEST_LEAD)
            latest += self._lead
        self.above = latest

    def late(self) -> None:
        """The publishers are slow: asks for any version newer than the one the subscriber has."""
        self.above = self._has
        self._lead = 0
