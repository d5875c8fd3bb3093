"""From whom subscribers take versions, simulated: subscribers join, die and lose their sources."""

from __future__ import annotations

import random

import pytest

from moolink.weights.source_choice import Key, Source, SourceChoice

HOME = "host of the publisher"


def key(version: int) -> Key:
    return ("instance", version, "")


def test_a_subscriber_of_the_publisher_s_host_maps_its_copy() -> None:
    choice = SourceChoice(HOME)
    for name in "abc":
        assert choice.begin(name, HOME, key(1), "abc") == Source(None, whole=True)


def test_hosts_form_a_chain_and_a_host_fetches_once() -> None:
    choice = SourceChoice(HOME)
    names = [f"{host}{i}" for host in "pqr" for i in range(3)]
    sources = {name: choice.begin(name, name[0], key(1), names) for name in names}
    assert sources["p0"] == Source(None, whole=False)
    assert sources["q0"] == Source("p0", whole=False)
    assert sources["r0"] == Source("q0", whole=False)
    for host in "pqr":
        assert sources[f"{host}1"] == sources[f"{host}2"] == Source(f"{host}0", whole=True)


def test_a_late_joiner_asks_the_one_that_is_asked_least() -> None:
    choice = SourceChoice(HOME)
    for name in "pq":
        choice.begin(name, name, key(1), "pq")
    for name in "pq":
        choice.done(name)
    first = choice.begin("r", "r", key(1), "pqr").peer
    second = choice.begin("s", "s", key(1), "pqrs").peer
    assert {first, second} == {"p", "q"}


def test_what_has_failed_is_not_asked_again() -> None:
    choice = SourceChoice(HOME)
    for name in "pqr":
        choice.begin(name, name, key(1), "pqr")
    assert choice.again("r", "q", "pqr") == Source("p", whole=False)
    assert choice.again("r", "p", "pqr") == Source(None, whole=False)
    assert choice.again("r", None, "pqr") is None


def test_a_subscriber_of_another_version_or_that_has_died_is_not_asked() -> None:
    choice = SourceChoice(HOME)
    choice.begin("p", "p", key(1), "pq")
    assert choice.begin("q", "q", key(2), "pq").peer is None
    choice.begin("r", "r", key(1), "pqr")
    assert choice.begin("s", "s", key(1), "s").peer is None


class World:
    """Subscribers that fetch one chunk after another from their sources; some die."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.choice = SourceChoice(HOME)
        self.version = 0
        self.alive: set[str] = set()
        self.chunks: dict[str, int] = {}  # that each has of the version it fetches
        self.sources: dict[str, Source | None] = {}
        self.from_publisher: list[str] = []  # hosts that fetched this version from the publisher
        self.replaced = 0  # subscribers that lost a source, or the version's first readers
        self.trace: list[str] = []

    TOTAL = 4

    def host(self, name: str) -> str:
        number = int(name[1:]) % 5
        return HOME if number == 0 else f"host {number}"

    def begin(self, name: str) -> None:
        self.alive.add(name)
        self.chunks[name] = 0
        source = self.choice.begin(name, self.host(name), key(self.version), self.alive)
        self.take(name, source)

    def take(self, name: str, source: Source | None) -> None:
        self.sources[name] = source
        self.trace.append(f"{name} {source}")
        if source is not None and source.peer is None and not source.whole:
            self.from_publisher.append(self.host(name))
        assert source is None or source.peer != name
        seen = {name}
        while source is not None and source.peer in self.sources and source.peer is not None:
            assert source.peer not in seen, "subscribers wait for each other"
            seen.add(source.peer)
            if self.chunks[source.peer] >= self.TOTAL:
                break
            source = self.sources[source.peer]

    def fetch(self, name: str) -> None:
        """A subscriber makes progress, if its source has what it needs."""
        source = self.sources[name]
        if source is None or self.chunks[name] >= self.TOTAL:
            return
        peer = source.peer
        if peer is None:
            self.chunks[name] += 1
        elif peer not in self.alive:
            self.replaced += 1
            self.take(name, self.choice.again(name, peer, self.alive))
            return
        elif source.whole:
            assert self.host(peer) == self.host(name)
            if self.chunks[peer] >= self.TOTAL:
                self.chunks[name] = self.TOTAL
        elif self.chunks[peer] > self.chunks[name]:
            self.chunks[name] += 1
        if self.chunks[name] >= self.TOTAL:
            self.choice.done(name)

    def publish(self) -> None:
        for name in sorted(self.alive):
            while self.chunks[name] < self.TOTAL:
                self.settle()
        self.version += 1
        self.from_publisher.clear()
        self.replaced = 0
        for name in sorted(self.alive):
            self.begin(name)

    def settle(self) -> None:
        before = dict(self.chunks), dict(self.sources)
        for name in sorted(self.alive):
            self.fetch(name)
        assert before != (self.chunks, self.sources), f"nobody makes progress: {self.sources}"

    def die(self, name: str) -> None:
        self.alive.discard(name)
        self.replaced += 1
        del self.chunks[name], self.sources[name]
        if self.random.random() < 0.5:  # the publisher does not hear of every death
            self.choice.forget(name)

    def step(self) -> None:
        names = sorted(self.alive)
        choice = self.random.random()
        if choice < 0.15 and len(names) < 20:
            new = f"s{self.random.randrange(40)}"
            if new not in self.alive:
                self.begin(new)
        elif choice < 0.22 and names:
            self.die(self.random.choice(names))
        elif choice < 0.27:
            self.publish()
        elif names:
            self.fetch(self.random.choice(names))
        # A version crosses the publisher's link once, and once more for each that was lost.
        assert len(self.from_publisher) <= 1 + self.replaced


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_all_subscribers_get_all_versions_whoever_dies(first: int) -> None:
    for seed in range(first, first + 50):
        world = World(seed)
        for _ in range(300):
            world.step()
        world.publish()
        for name in sorted(world.alive):
            while world.chunks[name] < world.TOTAL:
                world.settle()


def test_the_same_seed_gives_the_same_trace() -> None:
    traces = []
    for _ in range(2):
        world = World(7)
        for _ in range(300):
            world.step()
        traces.append(world.trace)
    assert traces[0] == traces[1]


def test_the_simulation_catches_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    def lets_wait_in_a_circle(self: SourceChoice, name: str, other: str) -> bool:
        return False

    def always_asks_the_publisher(self: SourceChoice, name: str, alive: object) -> Source:
        return Source(None, whole=False)

    def asks_what_has_failed(
        self: SourceChoice, name: str, failed: str | None, alive: object
    ) -> Source | None:
        return Source(failed, whole=False)

    mistakes = {
        "_depends_on": lets_wait_in_a_circle,
        "_assign": always_asks_the_publisher,
        "again": asks_what_has_failed,
    }
    for method, mistake in mistakes.items():
        with monkeypatch.context() as patch:
            patch.setattr(SourceChoice, method, mistake)
            with pytest.raises((AssertionError, KeyError)):
                test_all_subscribers_get_all_versions_whoever_dies(0)
