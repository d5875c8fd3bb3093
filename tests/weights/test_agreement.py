"""Simulates a sharded subscriber and its publishers, some of which publish faster than messages
arrive."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from moolink.weights.agreement import ASK_AGAIN, SILENCE, Agreement, Holds, Subscriber

KEEP = 2
LATER_WITHIN = 1.0  # seconds until a subscriber gives up a later version
S = ("s", 0)


class Source:
    """A publisher, reduced to its versions."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.holds = Holds()
        self.waiting: tuple[int, int] | None = None  # the number of the question, above

    @property
    def newest(self) -> int | None:
        return self.kept[-1] if self.kept else None

    def publish(self, version: int, now: float) -> None:
        self.kept.append(version)
        self.holds.published(version, [(S, self.waiting[1])] if self.waiting else [], now)
        self.holds.forget(["s"], now)
        old = set(self.kept[:-KEEP]) - self.holds.versions
        self.kept = [version for version in self.kept if version not in old]
        assert len(self.kept) <= KEEP + 1


class World:
    """One subscriber; messages take milliseconds, versions from 0.01 ms to 0.1 s. One publisher
    may begin `late` seconds after the others, which publish each 0.1 s then."""

    def __init__(self, seed: int, step: int, versions: int, late: float = 0.0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.step, self.last = step, step * versions
        self.agreement = Agreement()
        self.taken: list[int] = []
        self.question = 0
        self.offers: dict[int, int] = {}
        # Seconds between versions.
        self.pace = 0.1 if late else 10 ** self.random.uniform(-5, -1)
        self.sources = [Source() for _ in range(3)]
        for source in self.sources:
            behind = self.random.choice([0, 3, 30]) * self.pace
            behind += late if source is self.sources[-1] else 0.0
            self.after(behind, lambda source=source: self.publish(source, step))
        self.ask()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), do))

    def send(self, do: Callable[[], None]) -> None:
        self.after(self.random.uniform(0.0005, 0.003), do)

    def publish(self, source: Source, version: int) -> None:
        source.publish(version, self.now)
        self.answer(source)
        if version < self.last:
            pause = self.pace * self.random.uniform(0.5, 1.5)
            self.after(pause, lambda: self.publish(source, version + self.step))

    def ask(self) -> None:
        self.question += 1
        number, above = self.question, self.agreement.above
        self.offers = {}

        def asked(source: Source) -> None:
            source.waiting = (number, above)
            source.holds.asked(S, above, source.newest, self.now)
            self.answer(source)

        def late() -> None:
            if number == self.question and len(self.offers) < len(self.sources):
                self.agreement.late()
                self.ask()

        for source in self.sources:
            self.send(lambda source=source: asked(source))
        self.after(LATER_WITHIN if self.agreement.asks_for_a_later_one else ASK_AGAIN, late)

    def answer(self, source: Source) -> None:
        if source.waiting is None or source.newest is None or source.newest <= source.waiting[1]:
            return
        number, above = source.waiting
        source.waiting = None
        version = source.holds.offer(S, above, source.newest)
        assert version > above
        index = self.sources.index(source)
        self.send(lambda: self.offered(number, index, version))

    def offered(self, number: int, index: int, version: int) -> None:
        if number != self.question:
            return
        self.offers[index] = version
        if len(self.offers) == len(self.sources):
            self.fetch(min(self.offers.values()))

    def fetch(self, version: int) -> None:
        found: list[bool] = []

        def asked(source: Source) -> None:
            found.append(version in source.kept)
            if len(found) == len(self.sources):
                self.send(lambda: self.fetched(version, all(found)))

        for source in self.sources:
            self.send(lambda source=source: asked(source))

    def fetched(self, version: int, whole: bool) -> None:
        if whole:
            assert not self.taken or version > self.taken[-1]
            self.taken.append(version)
            self.agreement.took(version)
        else:
            self.agreement.missed(list(self.offers.values()))
        self.ask()

    def run(self) -> None:
        """Runs until the subscriber has taken the last version."""
        until = 60.0 + 10 * self.pace * self.last / self.step
        while not self.taken or self.taken[-1] < self.last:
            self.now, _, do = heapq.heappop(self.events)
            assert self.now < until, f"{self.now:.3g} s, taken {self.taken[-3:]} of {self.last}"
            do()


@pytest.mark.parametrize("step", [1, 1000])
def test_the_last_version_is_taken_and_many_before_it(step: int) -> None:
    for seed in range(40):
        world = World(seed, step, versions=3000)
        world.run()
        # Each version may take some round trips, and the time by which the publishers are apart.
        bound = 3000 * world.pace / (0.2 + 100 * world.pace)
        assert len(world.taken) >= min(20, bound), (seed, len(world.taken), bound)


def test_a_version_is_held_until_a_publisher_that_begins_late_has_it() -> None:
    for seed in range(3):
        world = World(seed, 1, versions=2 * int(SILENCE / 0.1), late=3 * SILENCE)
        world.run()
        assert world.taken[0] == 1


def test_a_version_is_held_for_a_time_without_a_word_of_the_subscriber() -> None:
    holds = Holds()
    holds.asked(S, -1, 3, 0.0)
    holds.asked(("s", 1), -1, None, 0.0)
    holds.published(4, [(("s", 1), -1)], 10.0)
    holds.forget(["s"], SILENCE)
    assert holds.versions == {3, 4}
    holds.forget(["s"], SILENCE + 5)
    assert holds.versions == {4}
    holds.asked(("s", 1), -1, 5, SILENCE + 5)
    holds.forget(["s"], 2 * SILENCE + 5)
    assert holds.versions == {4}
    holds.forget(["another"], SILENCE + 5)
    assert holds.versions == set()


def test_subscribers_of_a_peer_have_a_version_each() -> None:
    holds = Holds()
    holds.asked(S, -1, 3, 0.0)
    holds.asked(("s", 1), 3, 4, 0.0)
    assert holds.versions == {3, 4}
    assert [holds.offer(("s", 1), 3, 9), holds.offer(S, -1, 9)] == [4, 3]
    holds.ended(S)
    holds.ended(S)
    assert holds.versions == {4}


def test_a_version_that_all_have_is_taken_at_once() -> None:
    agreement = Agreement()
    agreement.took(4)
    assert (agreement.above, agreement.asks_for_a_later_one) == (4, False)


def test_the_simulation_catches_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Holds.asked

    def keeps_none_for_those_who_wait(
        self: Holds, version: int, waiting: object, now: float
    ) -> None:
        pass

    def keeps_none(self: Holds, of: Subscriber, above: int, newest: int | None, now: float) -> None:
        self._held.pop(of, None)

    def keeps_for_ever(
        self: Holds, of: Subscriber, above: int, newest: int | None, now: float
    ) -> None:
        if newest is not None and newest > above:
            self._held.setdefault(of, (newest, now))

    def hears_once(self: Holds, of: Subscriber, above: int, newest: int | None, now: float) -> None:
        before = self._held.get(of)
        asked(self, of, above, newest, now)
        if before is not None and self._held.get(of) == (before[0], now):
            self._held[of] = before

    def offers_the_newest(self: Holds, of: Subscriber, above: int, newest: int) -> int:
        return newest

    def asks_for_the_latest_again(self: Agreement, offers: list[int]) -> None:
        self.above = max(offers) - 1

    def waits_for_ever(self: Agreement) -> None:
        pass

    mistakes = [
        (Holds, "published", keeps_none_for_those_who_wait),
        (Holds, "asked", keeps_none),
        (Holds, "asked", keeps_for_ever),
        (Holds, "asked", hears_once),
        (Holds, "offer", offers_the_newest),
        (Agreement, "missed", asks_for_the_latest_again),
        (Agreement, "late", waits_for_ever),
    ]
    for of, method, mistake in mistakes:
        with monkeypatch.context() as patch:
            patch.setattr(of, method, mistake)
            print(mistake.__name__)
            with pytest.raises((AssertionError, IndexError)):  # IndexError: nothing goes on
                test_a_version_is_held_until_a_publisher_that_begins_late_has_it()
                test_the_last_version_is_taken_and_many_before_it(1)
