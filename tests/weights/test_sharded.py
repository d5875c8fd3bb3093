"""Shard and ShardedSubscriber: trees that several publishers hold together."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moolink
from moolink import Publisher
from moolink.weights import Shard, ShardedSubscriber, agreement, names, sharded_subscriber, shards
from tests import waiting

LONG = 60.0


def boundaries(size: int, parts: int, shift: int = 0) -> list[tuple[int, int]]:
    """`size` rows in uneven parts."""
    edges = [min(size, size * i // parts + (shift if 0 < i < parts else 0)) for i in range(parts)]
    return list(itertools.pairwise([*edges, size]))


def tree(version: int) -> dict[str, Any]:
    random = np.random.default_rng(version)
    return {
        "rows": random.normal(size=(101, 7)).astype(np.float32),
        "columns": random.integers(0, 1 << 30, (5, 90)),
        "half": random.normal(size=(33,)).astype(ml_dtypes.bfloat16),
        "bias": np.arange(3) + version,
        "steps": version,
    }


AXIS = {"rows": 0, "columns": 1, "half": 0}


def shards_of(whole: dict[str, Any], rank: int, ranks: int, make: Any) -> dict[str, Any]:
    """What the rank-th of `ranks` publishers has; `make` gives its arrays' framework."""
    mine: dict[str, Any] = {}
    for name, value in whole.items():
        if name not in AXIS:
            mine[name] = value
            continue
        first, stop = boundaries(value.shape[AXIS[name]], ranks, shift=2)[rank]
        index = [slice(None)] * value.ndim
        index[AXIS[name]] = slice(first, stop)
        start = [0] * value.ndim
        start[AXIS[name]] = first
        mine[name] = Shard(make(value[tuple(index)]), start, value.shape)
    return mine


def as_torch(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def plain(value: Any) -> Any:
    """numpy's array of the same bits."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(value)


class Job:
    """Publishers, each with a peer, and peers that know their addresses."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self.publishers: list[Publisher] = []

    def publisher(self, name: str, **options: Any) -> Publisher:
        peer = moolink.Rpc(name)
        self.things.append(peer)
        self.publishers.append(Publisher(peer, "w", **options))
        return self.publishers[-1]

    def subscribe(self, name: str, *arguments: Any, **options: Any) -> ShardedSubscriber:
        peer = moolink.Rpc(name)
        for publisher in self.publishers:
            peer.connect(publisher._rpc.listen("127.0.0.1:0")[0])
        names = [publisher._rpc.get_name() for publisher in self.publishers]
        self.things += [peer, ShardedSubscriber(peer, "w", names, *arguments, **options)]
        subscriber: ShardedSubscriber = self.things[-1]
        return subscriber

    def close(self) -> None:
        for thing in (*reversed(self.things), *self.publishers):
            thing.close()


@pytest.fixture
def job() -> Iterator[Job]:
    one = Job()
    yield one
    one.close()


@pytest.mark.parametrize(
    ("make", "arrays"),
    [(np.array, "numpy"), (as_torch, "torch"), (jax.numpy.asarray, "jax"), (as_torch, "jax")],
)
def test_four_uneven_parts_become_three_others_bit_by_bit(job: Job, make: Any, arrays: Any) -> None:
    jax.config.update("jax_enable_x64", True)
    for rank in range(4):
        job.publisher(f"publisher-{rank}")

    def where(rank: int) -> Any:
        def part(path: str, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
            if path not in AXIS:
                return None
            first, stop = boundaries(shape[AXIS[path]], 3)[rank]
            return (slice(None),) * AXIS[path] + (slice(first, stop),)

        return part

    subscribers = [job.subscribe(f"s-{rank}", where(rank), arrays=arrays) for rank in range(3)]
    for version in (1, 2):
        whole = tree(version)
        for rank, publisher in enumerate(job.publishers):
            publisher.publish(shards_of(whole, rank, 4, make), version)
        for rank, subscriber in enumerate(subscribers):
            weights = subscriber.wait(version, LONG)
            assert weights.version == version
            for name, value in whole.items():
                expected = value
                if name in AXIS:
                    index = where(rank)(name, value.shape)
                    expected = value[index]
                found = plain(weights.tree[name])
                assert found.tobytes() == np.asarray(expected).tobytes(), name
    assert job.publishers[0].wait_acknowledged(2, 3, LONG).keys() == {"s-0", "s-1", "s-2"}
    jax.config.update("jax_enable_x64", False)


def test_only_the_bytes_of_the_wanted_parts_are_fetched(job: Job) -> None:
    for rank in range(2):
        job.publisher(f"publisher-{rank}")
    subscriber = job.subscribe("s", lambda path, shape: (slice(40, 60),))
    for rank, publisher in enumerate(job.publishers):
        half = np.full((50, 1000), rank, np.float32)
        publisher.publish([Shard(half, (50 * rank, 0), (100, 1000))], 0)
    (rows,) = subscriber.wait(0, LONG).tree
    assert rows[:, 0].tolist() == [0.0] * 10 + [1.0] * 10
    stats = subscriber.stats()
    assert (stats["pieces"], stats["bytes"]) == (2, 20 * 1000 * 4)


def test_a_version_is_current_once_all_publishers_have_made_it(job: Job) -> None:
    first, second = job.publisher("a"), job.publisher("b")
    for version in range(3):
        first.publish([Shard(np.array([version]), [0], [2])], version)
    subscriber = job.subscribe("s")
    with pytest.raises(moolink.TimeoutError, match="no version 0 of 'w' came from 'a', 'b'"):
        subscriber.wait(0, 0.3)
    second.publish([Shard(np.array([0]), [1], [2])], 0)  # which the first one keeps no more
    waiting.until(
        lambda: "longer keeps version 0" in subscriber.stats()["waiting_for"], "a left-out version"
    )
    second.publish([Shard(np.array([1]), [1], [2])], 1)
    weights = subscriber.wait(0, LONG)
    assert weights.version == 1
    assert weights.tree[0].tolist() == [1, 1]


def test_a_publisher_that_is_ahead_keeps_a_version_for_the_others(job: Job) -> None:
    first, second = job.publisher("a", keep=1), job.publisher("b", keep=1)
    subscriber = job.subscribe("s")
    for publisher in (first, second):
        waiting.until(lambda one=publisher: one.stats()["waiting"] == 1, "the subscriber")
    for version in range(9):
        first.publish([Shard(np.array([version]), [0], [2])], version)
    assert first.stats()["kept"] == [0, 8]
    for version in range(9):
        second.publish([Shard(np.array([version]), [1], [2])], version)
        if version == 0:
            assert subscriber.wait(0, LONG).tree[0].tolist() == [0, 0]
    assert subscriber.wait(8, LONG).tree[0].tolist() == [8, 8]
    subscriber.close()
    job.things[-2].close()
    waiting.until(lambda: not first.acknowledged(), "the end of the subscriber's peer")
    first.publish([Shard(np.array([9]), [0], [2])], 9)
    assert first.stats()["kept"] == [9]


def test_a_version_is_held_for_each_subscriber_of_a_peer_until_it_is_closed(job: Job) -> None:
    first, second = job.publisher("a", keep=1), job.publisher("b", keep=1)
    subscriber = job.subscribe("s")
    another = ShardedSubscriber(subscriber._rpc, "w", ["a", "b"])
    waiting.until(lambda: first.stats()["waiting"] == 2, "both subscribers")
    first.publish([np.zeros(2)], 0)
    waiting.until(lambda: first.stats()["waiting"] == 0, "both offers")
    first.publish([np.ones(2)], 1)
    another.close()
    waiting.until(lambda: len(first._holds._held) == 1, "the end of one subscriber")
    first.publish([np.ones(2)], 2)
    assert first.stats()["kept"] == [0, 2]
    second.publish([np.zeros(2)], 0)
    assert subscriber.wait(0, LONG).version == 0
    waiting.until(lambda: first._holds.versions == {2}, "the next question")
    first.publish([np.ones(2)], 3)
    assert first.stats()["kept"] == [2, 3]
    subscriber.close()
    waiting.until(lambda: first.stats()["kept"] == [3], "the end of the other one")


def test_a_subscriber_closes_whatever_has_become_of_its_publishers(job: Job) -> None:
    publisher = job.publisher("a")
    publisher.publish([np.ones(2)], 0)
    subscriber, lost = job.subscribe("s"), job.subscribe("t")
    for one in (subscriber, lost):
        one.wait(0, LONG)
    publisher.close()
    subscriber.close()
    lost._rpc.close()
    lost.close()


def test_a_version_is_held_no_more_for_a_subscriber_of_whom_nothing_is_heard(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = job.publisher("a", keep=1)
    publisher.publish([np.zeros(2)], 0)
    with moolink.Rpc("s") as peer:
        peer.connect(publisher._rpc.listen("127.0.0.1:0")[0])
        peer.sync("a", names.PARTS_NEXT.format("w"), "s", 7, None, -1, "")
        publisher.publish([np.zeros(2)], 1)
        assert publisher.stats()["kept"] == [0, 1]
        monkeypatch.setattr(agreement, "SILENCE", -1.0)
        publisher.publish([np.zeros(2)], 2)
        assert publisher.stats()["kept"] == [2]


def test_a_subscriber_that_waits_for_others_is_heard(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_subscriber, "ASK_AGAIN", 0.1)
    first, second = job.publisher("a", keep=1), job.publisher("b", keep=1)
    subscriber = job.subscribe("s")
    waiting.until(lambda: first.stats()["waiting"] == 1, "the subscriber")
    first.publish([np.zeros(2)], 0)
    for _ in range(3):
        held = dict(first._holds._held)
        waiting.until(lambda was=held: first._holds._held != was, "its asking again")
        assert first._holds.versions == {0}
    first.publish([np.ones(2)], 1)
    second.publish([np.zeros(2)], 0)
    assert subscriber.wait(0, LONG).version == 0


def test_an_older_version_is_converted_too(job: Job) -> None:
    first, second = job.publisher("a"), job.publisher("b")
    for version in range(2):
        first.publish([Shard(np.full(2, version, np.float32), [0], [4])], version)
    second.publish([Shard(np.zeros(2, np.float32), [2], [4])], 0)
    subscriber = job.subscribe("s", dtype="float16")
    (array,) = subscriber.wait(0, LONG).tree
    assert (array.dtype, array.tolist()) == (np.float16, [0.0] * 4)


def test_whole_arrays_come_from_another_publisher_each(job: Job) -> None:
    for rank in range(2):
        job.publisher(f"publisher-{rank}")
    subscriber = job.subscribe("s")
    for publisher in job.publishers:
        publisher.publish([np.zeros(10), np.ones(10)], 0)
    subscriber.wait(0, LONG)
    assert subscriber.stats()["pieces"] == 2
    assert [len(pieces) for pieces in subscriber._plan] == [1, 1]


def test_elements_that_nobody_has_are_named(job: Job) -> None:
    job.publisher("a").publish({"w": Shard(np.zeros(3), [0], [4])}, 0)
    subscriber = job.subscribe("s")
    with pytest.raises(moolink.TimeoutError, match=r"w: no publisher has all of \(\(0, 4\),\)"):
        subscriber.wait(0, 1.0)


def test_trees_that_do_not_belong_together_are_named(job: Job) -> None:
    job.publisher("a").publish({"w": np.zeros(3)}, 0)
    job.publisher("b").publish({"w": np.zeros(4)}, 0)
    subscriber = job.subscribe("s")
    with pytest.raises(moolink.TimeoutError, match="'b' and 'a' publish trees of other arrays"):
        subscriber.wait(0, 1.0)


def test_a_publisher_that_comes_back_goes_on(job: Job) -> None:
    for name in ("a", "b"):
        job.publisher(name).publish([np.zeros(2)], 5)
    subscriber = job.subscribe("s")
    assert subscriber.wait(5, LONG).version == 5
    second = job.publishers.pop()
    second.close()
    again = Publisher(second._rpc, "w")
    job.publishers.append(again)
    again.publish([np.ones(2)], 3)  # it has lost its count
    job.publishers[0].publish([np.ones(2)], 6)
    again.publish([np.ones(2)], 6)
    assert subscriber.wait(6, LONG).tree[0].tolist() == [1.0, 1.0]


def test_no_version_is_torn_while_publishers_are_at_different_ones(job: Job) -> None:
    for rank in range(3):
        job.publisher(f"publisher-{rank}", keep=3)
    subscriber = job.subscribe("s")
    last = 60

    def publish(rank: int) -> None:
        for version in range(last + 1):
            part = np.full((1, 5000), version)
            job.publishers[rank].publish([Shard(part, (rank, 0), (3, 5000))], version)

    threads = [threading.Thread(target=publish, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    seen = -1
    while seen < last:
        weights = subscriber.wait(seen + 1, LONG)
        assert weights.version > seen
        assert (weights.tree[0] == weights.version).all()
        seen = weights.version
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((2, 2)), (0,), (4, 4)), "of shape (2, 2) at (0,)"),
        ((np.zeros(3), [2], [4]), "is not in an array of (4,)"),
        ((np.zeros(3), [-1], [4]), "is not in an array of (4,)"),
    ],
)
def test_a_part_outside_of_its_array_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Shard(*arguments)
    assert message in str(raised.value)


@pytest.mark.parametrize("given", [slice(0, 2), [slice(0, 2)], (0,), np.arange(2), 0])
def test_what_is_no_part_is_named(given: Any) -> None:
    with pytest.raises(ValueError, match=r"w: .*(is no part of an array|slices without a step)"):
        shards.wanted_region(lambda path, shape: given, "w", (4,))


def test_a_part_that_is_no_array_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a part must be an array, got a list"):
        Shard([1, 2], [0], [4])


def test_wrong_arguments_are_refused() -> None:
    with moolink.Rpc("s") as peer:
        for publishers in ("a", [], ["a", "a"]):
            with pytest.raises(ValueError, match="names of different peers"):
                ShardedSubscriber(peer, "w", publishers)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_plan_has_each_wanted_element_from_a_publisher_that_has_it(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), min_size=0, max_size=3))

    def region() -> shards.Region:
        drawn = []
        for size in shape:
            first = data.draw(st.integers(0, size))
            drawn.append((first, data.draw(st.integers(first, size))))
        return tuple(drawn)

    wanted = region()
    held = [[region()] for _ in range(data.draw(st.integers(1, 4)))]
    there = np.zeros(shape, np.bool_)
    for (part,) in held:
        there[shards.relative(part, tuple((0, 0) for _ in shape))] = True
    whole = tuple((0, 0) for _ in shape)
    asked = shards.relative(wanted, whole)
    if not there[asked].all():
        with pytest.raises(ValueError, match="no publisher has all of"):
            shards.plan([wanted], held, ["w"])
        return
    got = np.zeros(shape, np.bool_)
    for pieces, (part,) in zip(shards.plan([wanted], held, ["w"]), held, strict=True):
        for piece in pieces:
            assert shards.contains(part, piece.region)
            assert shards.contains(wanted, piece.region)
            got[shards.relative(piece.region, whole)] = True
    assert got[asked].all()


@pytest.mark.parametrize("step", [1, 1000])
def test_publishers_that_never_rest_starve_no_subscriber(job: Job, step: int) -> None:
    for rank in range(3):
        job.publisher(f"publisher-{rank}")
    subscriber = job.subscribe("s")
    stop = threading.Event()
    last = [0, 0, 0]

    def publish(rank: int) -> None:
        while not stop.is_set():
            last[rank] += step
            part = np.full((1, 5000), last[rank])
            job.publishers[rank].publish([Shard(part, (rank, 0), (3, 5000))], last[rank])

    threads = [threading.Thread(target=publish, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    try:
        seen = -1
        for _ in range(20):
            weights = subscriber.wait(seen + 1, LONG)
            assert (weights.tree[0] == weights.version).all()
            seen = weights.version
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    final = max(last) + step
    for rank, publisher in enumerate(job.publishers):
        publisher.publish([Shard(np.full((1, 5000), final), (rank, 0), (3, 5000))], final)
    assert subscriber.wait(final, LONG).version == final
    assert all(len(publisher.stats()["kept"]) <= 3 for publisher in job.publishers)
