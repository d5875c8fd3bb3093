"""Machines without I/O that choose the version of a sharded tree: publishers and subscriber agree.

docs/design/protocol/publication.md has their rules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

_LARGEST_LEAD = 1 << 20


Subscriber = tuple[str, int]
"""A sharded subscriber: its peer's name, and its number there."""

SILENCE = 120.0
"""Seconds for which a version is held without a word of its subscriber."""
ASK_AGAIN = 30.0
"""Seconds after which a subscriber asks again, so that it is heard."""


class Holds:
    """A publisher's side: the version that it keeps for each sharded subscriber, which it has
    offered or will offer. `now` is in seconds."""

    def __init__(self) -> None:
        # The version, and when the subscriber was last heard.
        self._held: dict[Subscriber, tuple[int, float]] = {}

    @property
    def versions(self) -> set[int]:
        """Those that are kept."""
        return {version for version, _ in self._held.values()}

    def asked(self, subscriber: Subscriber, above: int, newest: int | None, now: float) -> None:
        """A subscriber wants a version above one."""
        held = self._held.pop(subscriber, None)
        version = newest if held is None or held[0] <= above else held[0]
        if version is not None and version > above:
            self._held[subscriber] = (version, now)

    def published(
        self, version: int, waiting: Iterable[tuple[Subscriber, int]], now: float
    ) -> None:
        """There is a new version; some subscribers wait for one above theirs."""
        for subscriber, above in waiting:
            if version > above:
                self._held.setdefault(subscriber, (version, now))

    def offer(self, subscriber: Subscriber, above: int, newest: int) -> int:
        """The version to offer: the one that is kept, or the newest."""
        held, _ = self._held.get(subscriber, (above, 0.0))
        return held if held > above else newest

    def ended(self, subscriber: Subscriber) -> None:
        """A subscriber was closed."""
        self._held.pop(subscriber, None)

    def forget(self, alive: Collection[str], now: float) -> None:
        """Removes the subscribers of peers that are not alive, and silent ones."""
        for subscriber, (_, heard) in list(self._held.items()):
            if subscriber[0] not in alive or now - heard > SILENCE:
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
