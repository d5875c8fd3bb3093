"""Arrays after os.fork: what parent and child see of each other's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import moolink
from tests import forks
from tests.rpc.conftest import Pair
from tests.waiting import until

Array = npt.NDArray[Any]
# Of the elements of an array: blocks that share a segment with others, and one of its own.
SIZES = pytest.mark.parametrize("size", [300 << 10, 4 << 20])


@pytest.fixture
def neighbours() -> Iterator[Pair]:
    """A client and a server that share memory."""
    server = moolink.Rpc("server", timeout=20)
    client = moolink.Rpc("client", timeout=20)
    server.define("make", lambda size, value: np.full(size, value, np.uint8))
    with server, client:
        client.connect(server.listen("127.0.0.1:0")[0])
        until(lambda: client.explain("server")["path"] == "shm", "the shared memory path")
        yield client, server


@pytest.fixture
def events() -> Iterator[Callable[[], forks.Event]]:
    made: list[forks.Event] = []

    def make() -> forks.Event:
        made.append(forks.Event())
        return made[-1]

    yield make
    for event in made:
        event.close()


def holds(array: Array, value: int) -> bool:
    return bool((array == value).all())


@SIZES
def test_what_the_parent_receives_later_does_not_reach_a_childs_array(
    neighbours: Pair, events: Callable[[], forks.Event], size: int
) -> None:
    client, _ = neighbours
    kept = [client.sync("server", "make", size, value) for value in (1, 2, 3)]
    received = events()

    def look() -> None:
        received.wait()
        for value, array in enumerate(kept, 1):
            assert holds(array, value)

    child = forks.start(look)
    kept.clear()
    for _ in range(30):
        assert holds(client.sync("server", "make", size, 9), 9)
    received.set()
    assert forks.exit_status(child) == 0


@SIZES
def test_neither_side_sees_what_the_other_writes_into_a_result(
    neighbours: Pair, events: Callable[[], forks.Event], size: int
) -> None:
    client, _ = neighbours
    array = client.sync("server", "make", size, 1)
    parent_has_written, child_has_written = events(), events()

    def write() -> None:
        parent_has_written.wait()
        assert holds(array, 1)
        array[:] = 3
        child_has_written.set()

    child = forks.start(write)
    array[: size // 2] = 2
    parent_has_written.set()
    child_has_written.wait()
    assert holds(array[: size // 2], 2)
    assert holds(array[size // 2 :], 1)
    assert forks.exit_status(child) == 0


def test_an_argument_that_a_handler_keeps_is_private(
    neighbours: Pair, events: Callable[[], forks.Event]
) -> None:
    client, server = neighbours
    kept: list[Array] = []
    server.define("keep", kept.append)
    client.sync("server", "keep", np.full(4 << 20, 1, np.uint8))
    received = events()

    def look() -> None:
        received.wait()
        assert holds(kept[0], 1)
        kept[0][:] = 5

    child = forks.start(look)
    first = kept.pop()
    for _ in range(20):
        client.sync("server", "keep", np.full(4 << 20, 9, np.uint8))
        kept.pop()
    received.set()
    assert forks.exit_status(child) == 0
    assert holds(first, 1)


def test_an_array_that_outlives_its_connection_is_private(
    neighbours: Pair, events: Callable[[], forks.Event]
) -> None:
    client, server = neighbours
    array = client.sync("server", "make", 4 << 20, 1)
    client.close()
    server.close()
    written = events()

    def write() -> None:
        array[:] = 2
        written.set()

    child = forks.start(write)
    written.wait()
    assert holds(array, 1)
    assert forks.exit_status(child) == 0


def test_each_of_many_children_has_what_was_there_as_it_was_forked(neighbours: Pair) -> None:
    client, _ = neighbours
    array = client.sync("server", "make", 1 << 20, 0)

    def check(value: int) -> Callable[[], None]:
        def run() -> None:
            assert holds(array, value)
            array[:] = 99

        return run

    for value in range(1, 20):
        array[:] = value
        children = [forks.start(check(value)) for _ in range(2)]
        assert holds(client.sync("server", "make", 1 << 20, 100), 100)
        assert [forks.exit_status(child) for child in children] == [0, 0]
        assert holds(array, value)


def test_a_call_that_is_under_way_at_a_fork_brings_its_array(neighbours: Pair) -> None:
    client, server = neighbours
    server.define("echo", lambda array: array)
    data = np.random.default_rng(0).integers(0, 255, 32 << 20, np.uint8)
    for _ in range(10):
        future = client.async_("server", "echo", data)
        child = forks.start(lambda: None)
        assert (future.result() == data).all()
        assert forks.exit_status(child) == 0


def test_memory_does_not_pile_up_over_many_forks(neighbours: Pair) -> None:
    """What was in use at a fork is not used again, but goes with its array."""
    client, _ = neighbours

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("moolink-grants" in line for line in maps)

    def fork_with_arrays() -> None:
        arrays = [client.sync("server", "make", size, 1) for size in (300 << 10, 4 << 20)]
        assert forks.exit_status(forks.start(arrays.clear)) == 0

    for _ in range(3):
        fork_with_arrays()
    before = mapped()
    for _ in range(20):
        fork_with_arrays()
    until(lambda: mapped() <= before + 4, "the segments to be unmapped")


def lent(size: int, value: int) -> Array:
    array = moolink.empty(size, "uint8")
    array[:] = value
    return array


@pytest.mark.parametrize("size", [100, 300 << 10, 4 << 20])
def test_a_borrowed_array_stays_what_it_was(
    neighbours: Pair, events: Callable[[], forks.Event], size: int
) -> None:
    client, server = neighbours
    kept: list[Array] = []
    server.define("keep", kept.append)
    mine = lent(size, 1)
    future = client.async_("server", "keep", moolink.lend(mine))
    future.result()
    assert not kept[0].flags.writeable
    returned = events()

    def look() -> None:
        returned.wait()
        assert holds(kept[0], 1)

    child = forks.start(look)
    assert holds(kept[0], 1)
    kept.clear()
    assert future.released.wait(20)
    mine[:] = 2
    # What is lent later, from the same memory, is seen as it is.
    client.sync("server", "keep", moolink.lend(mine))
    assert holds(kept[0], 2)
    returned.set()
    assert forks.exit_status(child) == 0


def test_memory_that_can_be_lent_is_shared_with_children_and_never_used_again(
    neighbours: Pair, events: Callable[[], forks.Event]
) -> None:
    client, server = neighbours
    server.define("first", lambda array: int(array[0]))
    kept = [lent(1 << 20, 1)]
    written, freed = events(), events()

    def write() -> None:
        kept[0][:] = 2
        written.set()
        freed.wait()
        assert holds(kept[0], 3)
        kept[0][:] = 4

    child = forks.start(write)
    written.wait()
    assert holds(kept[0], 2)
    assert client.sync("server", "first", moolink.lend(kept[0])) == 2
    kept[0][:] = 3
    kept.clear()
    gc.collect()
    others = [lent(1 << 20, 9) for _ in range(80)]
    freed.set()
    assert forks.exit_status(child) == 0
    assert all(holds(other, 9) for other in others)
