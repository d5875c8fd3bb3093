"""Arrays that are captured straight into the receiver's memory, and those that are not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import moolink
from tests.waiting import until

Pair = tuple[moolink.Rpc, moolink.Rpc]
SIZES = [64 << 10, 256 << 10, (1 << 20) + 12, 20 << 20]


def filled(size: int, value: int) -> np.ndarray:
    return np.full(size, value, np.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_the_bytes_are_those_at_the_time_of_the_call(pair: Pair, size: int) -> None:
    client, server = pair
    server.define("all", lambda array: (array.min(), array.max(), array.size))
    array = filled(size, 0)
    futures = []
    for value in range(12):
        array[:] = value
        futures.append(client.async_("server", "all", array))
        array[:] = 255
    for value, future in enumerate(futures):
        assert future.result() == (value, value, size)


@pytest.mark.parametrize("size", SIZES)
def test_arguments_and_results_belong_to_their_receiver(pair: Pair, size: int) -> None:
    client, server = pair
    kept: list[np.ndarray] = []

    def change(array: np.ndarray) -> np.ndarray:
        array += 1
        kept.append(array)
        return array

    server.define("change", change)
    array = filled(size, 1)
    results = [client.sync("server", "change", array) for _ in range(6)]
    for result in results:
        result += 1
    assert all((result == 3).all() for result in results)
    assert all((result == 2).all() for result in kept)
    assert (array == 1).all()


def frames_of(function: Callable[[], object], peer: moolink.Rpc) -> int:
    before = peer.stats()["frames_written"]
    function()
    return peer.stats()["frames_written"] - before


@pytest.mark.parametrize("pair", ["shm"], indirect=True)
def test_a_large_array_in_shared_memory_is_one_frame(pair: Pair) -> None:
    client, server = pair
    server.define("size", len)
    server.define("make", lambda size: np.zeros(size, np.uint8))
    array = filled(1 << 20, 1)
    client.sync("server", "size", b"")
    until(lambda: client.explain("server")["path"] == "shm", "shared memory")
    for _ in range(4):  # the first ones ask for memory
        client.sync("server", "size", array)
        client.sync("server", "make", 1 << 20)
    # Its answer to a reply, a grant that stands, is a frame too.
    assert frames_of(lambda: client.sync("server", "size", array), client) <= 2
    assert frames_of(lambda: client.sync("server", "make", 1 << 20), server) <= 2


def test_calls_of_many_threads_share_the_memory_given(pair: Pair) -> None:
    client, server = pair
    server.define("sum", lambda array: int(array.sum()))
    wrong: list[object] = []

    def call(value: int) -> None:
        for i in range(20):
            array = np.full(100_000 + 50_000 * (i % 3), value + i, np.int64)
            if client.sync("server", "sum", array) != array.size * (value + i):
                wrong.append((value, i))

    threads = [threading.Thread(target=call, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_what_cannot_be_sent_gives_the_memory_back(pair: Pair) -> None:
    client, server = pair
    server.define("size", len)
    array = filled(1 << 20, 1)
    for _ in range(3):
        client.sync("server", "size", array)
    for _ in range(20):
        with pytest.raises(TypeError, match="cannot be sent"):
            client.async_("server", "size", array, object())
        client.async_("server", "size", array).cancel()
    assert client.sync("server", "size", array) == 1 << 20
