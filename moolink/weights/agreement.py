"""Which version of a sharded tree a subscriber takes from all publishers: machines without I/O.

Their rules: docs/design/protocol/publication.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_LARGEST_LEAD = 1 << 20


class Holds:
    """A publisher's side: the version that it keeps for each sharded subscriber, which it has
    offered or will offer."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    @property
    def versions(self) -> set[int]:
        """Those that are kept."""
        return set(self._held.values())

    def asked(self, subscriber: str, above: int, newest: int | None) -> None:
        """A subscriber wants a version above one."""
        if self._held.get(subscriber, above) <= above:
            self._held.pop(subscriber, None)
        if newest is not None and newest > above:
            self._held.setdefault(subscriber, newest)

    def published(self, version: int, waiting: Iterable[tuple[str, int]]) -> None:
        """There is a new version; some subscribers wait for one above theirs."""
        for subscriber, above in waiting:
            if version > above:
                self._held.setdefault(subscriber, version)

    def offer(self, subscriber: str, above: int, newest: int) -> int:
        """The version to offer: the one that is kept, or the newest."""
        held = self._held.get(subscriber, above)
        return held if held > above else newest

    def forget(self, alive: Iterable[str]) -> None:
        """Only these subscribers are left."""
        for subscriber in self._held.keys() - set(alive):
            del self._held[subscriber]


class Agreement:
    """A subscriber's side: the version above which it asks all publishers for one.

    It takes the lowest version that they offer. A publisher that offers a later one may have it no
    more. Then the subscriber asks all for the latest one, and, if some have passed that meanwhile,
    for later and later ones: publishers that have not come so far keep it once they have.
    """

    def __init__(self) -> None:
        self.above = -1
        self._has = -1
        self._lead = 0  # versions asked for ahead of the latest one

    @property
    def asks_for_a_later_one(self) -> bool:
        """Whether publishers might stop before they have come so far: see `late`."""
        return self.above > self._has

    def took(self, version: int) -> None:
        """All publishers have given a version."""
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
        """The publishers take long: asks for whatever is newer than what the subscriber has."""
        self.above = self._has
        self._lead = 0
