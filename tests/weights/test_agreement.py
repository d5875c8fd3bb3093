"""Simulates a sharded subscriber and its publishers, some of which publish faster than messages
arrive."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import pytest

from moolink.weights.agreement import Agreement, Holds

KEEP = 2
HURRY = 1.0  # seconds until a subscriber no longer waits for a later version


class Source:
    """A publisher, reduced to its versions."""

    def __init__(self) -> None:
        self.kept: list[int] = []
        self.holds = Holds()
        self.waiting: tuple[int, int] | None = None  # the number of the question, above

    @property
    def newest(self) -> int | None:
        return self.kept[-1] if self.kept else None

    def publish(self, version: int) -> None:
        self.kept.append(version)
        self.holds.published(version, [("s", self.waiting[1])] if self.waiting else [])
        old = set(self.kept[:-KEEP]) - self.holds.versions
        self.kept = [version for version in self.kept if version not in old]
        assert len(self.kept) <= KEEP + 1


class World:
    """One subscriber; messages take milliseconds, versions from 0.01 ms to 0.1 s."""

    def __init__(self, seed: int, step: int, versions: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.step, self.last = step, step * versions
        self.agreement = Agreement()
        self.taken: list[int] = []
        self.question = 0
        self.offers: dict[int, int] = {}
        self.pace = 10 ** self.random.uniform(-5, -1)  # seconds between versions
        self.sources = [Source() for _ in range(3)]
        for source in self.sources:
            behind = self.random.choice([0, 3, 30]) * self.pace
            self.after(behind, lambda source=source: self.publish(source, step))
        self.ask()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), do))

    def send(self, do: Callable[[], None]) -> None:
        self.after(self.random.uniform(0.0005, 0.003), do)

    def publish(self, source: Source, version: int) -> None:
        source.publish(version)
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
            source.holds.asked("s", above, source.newest)
            self.answer(source)

        def late() -> None:
            if number == self.question and len(self.offers) < len(self.sources):
                self.agreement.late()
                self.ask()

        for source in self.sources:
            self.send(lambda source=source: asked(source))
        if self.agreement.asks_for_a_later_one:
            self.after(HURRY, late)

    def answer(self, source: Source) -> None:
        if source.waiting is None or source.newest is None or source.newest <= source.waiting[1]:
            return
        number, above = source.waiting
        source.waiting = None
        version = source.holds.offer("s", above, source.newest)
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


def test_a_version_that_all_have_is_taken_at_once() -> None:
    agreement = Agreement()
    agreement.took(4)
    assert (agreement.above, agreement.asks_for_a_later_one) == (4, False)


def test_the_simulation_catches_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps_none_for_those_who_wait(self: Holds, version: int, waiting: object) -> None:
        pass

    def keeps_none(self: Holds, subscriber: str, above: int, newest: int | None) -> None:
        self._held.pop(subscriber, None)

    def keeps_for_ever(self: Holds, subscriber: str, above: int, newest: int | None) -> None:
        if newest is not None and newest > above:
            self._held.setdefault(subscriber, newest)

    def offers_the_newest(self: Holds, subscriber: str, above: int, newest: int) -> int:
        return newest

    def asks_for_the_latest_again(self: Agreement, offers: list[int]) -> None:
        self.above = max(offers) - 1

    def waits_for_ever(self: Agreement) -> None:
        pass

    mistakes = [
        (Holds, "published", keeps_none_for_those_who_wait),
        (Holds, "asked", keeps_none),
        (Holds, "asked", keeps_for_ever),
        (Holds, "offer", offers_the_newest),
        (Agreement, "missed", asks_for_the_latest_again),
        (Agreement, "late", waits_for_ever),
    ]
    for of, method, mistake in mistakes:
        with monkeypatch.context() as patch:
            patch.setattr(of, method, mistake)
            print(mistake.__name__)
            with pytest.raises((AssertionError, IndexError)):  # IndexError: no event is left
                test_the_last_version_is_taken_and_many_before_it(1)
