"""Lending: arrays that are mapped by their receiver instead of being copied."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

import moolink
from moolink import _core
from tests import descriptors
from tests.rpc.conftest import Pair, Start
from tests.waiting import until

SIZE = 1 << 20


@pytest.fixture
def neighbours() -> Iterator[Pair]:
    """A client and a server that share memory."""
    server = moolink.Rpc("server", timeout=20)
    client = moolink.Rpc("client", timeout=20)
    with server, client:
        client.connect(server.listen("127.0.0.1:0")[0])
        until(lambda: client.explain("server")["path"] == "shm", "the shared memory path")
        yield client, server


def test_what_is_lent_and_must_be_copied_is_released_after_the_copy(neighbours: Pair) -> None:
    client, server = neighbours
    server.define("last", lambda arrays: arrays[-1].copy())
    for _ in range(10):
        memory = np.ones(4 * SIZE)
        lent = moolink.lend(memory[::2], on_release=functools.partial(memory.fill, 7))
        assert (client.sync("server", "last", [np.ones(4 * SIZE), lent]) == 1).all()


def filled(size: int = SIZE, seed: int = 0) -> np.ndarray[Any, Any]:
    array = moolink.empty(size)
    array[:] = np.random.default_rng(seed).random(size)
    return array


def loans(rpc: moolink.Rpc, kind: str = "loans_given") -> int:
    return sum(peer[kind] for peer in rpc.peers())  # type: ignore[literal-required]


def test_lent_values_arrive_on_every_path(pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda tree: tree)
    large, outside = filled(), np.random.default_rng(1).random(50_000)
    tree = {"large": large, "outside": outside, "small": filled(100), "tiny": filled(3), "n": 7}
    for _ in range(3):
        back = client.sync("server", "echo", moolink.lend(tree))
        assert back.keys() == tree.keys()
        assert back["n"] == 7
        for name in ("large", "outside", "small", "tiny"):
            np.testing.assert_array_equal(back[name], tree[name])


def test_what_is_lent_cannot_be_written_on_any_path(pair: Pair) -> None:
    client, server = pair

    def write(array: np.ndarray[Any, Any]) -> str:
        try:
            array[0] = 1
        except ValueError as e:
            return str(e)
        return "written"

    server.define("write", write)
    for array in (filled(), filled(100), np.zeros(SIZE), filled()[::2]):
        assert "read-only" in client.sync("server", "write", moolink.lend(array))
        assert client.sync("server", "write", array) == "written"


def test_a_lent_array_is_the_lenders_memory(neighbours: Pair) -> None:
    client, server = neighbours
    kept: list[np.ndarray[Any, Any]] = []
    server.define("keep", kept.append)
    array = filled()
    future = client.async_("server", "keep", moolink.lend(array))
    future.result()
    array[7] = 42  # what a lender must not do shows that nothing was copied
    assert kept[0][7] == 42
    assert kept[0].ctypes.data % 64 == 0
    assert loans(client) == loans(server, "loans_held") == 1
    assert not future.released.done()
    kept.clear()
    assert future.released.result(timeout=20) is None
    until(lambda: loans(client) + loans(server, "loans_held") == 0, "the return")


def test_a_view_lends_its_elements_only(neighbours: Pair) -> None:
    client, server = neighbours
    server.define("describe", lambda x: (x.shape, float(x.sum()), x.ctypes.data % 4))
    matrix = filled(1000 * 100).reshape(1000, 100)
    for view in (matrix[3:900], matrix[1:], matrix.reshape(-1)[1:], matrix[:, 3]):
        shape, total, misaligned = client.sync("server", "describe", moolink.lend(view))
        assert (shape, misaligned) == (view.shape, 0)
        assert total == pytest.approx(float(view.sum()), rel=1e-5)


def test_views_at_the_borrower_keep_the_loan(neighbours: Pair) -> None:
    client, server = neighbours
    kept: list[Any] = []
    server.define("keep", kept.append)
    future = client.async_("server", "keep", moolink.lend(filled()))
    future.result()
    views = [kept[0][i : i + 10] for i in range(3)]
    kept.clear()
    while views:
        assert not future.released.wait(0.05)
        views.pop()
    assert future.released.wait(20)


def test_a_call_that_lends_nothing_is_released_at_once(pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda x: x)
    future = client.async_("server", "echo", np.zeros(SIZE))
    assert future.released.done()
    assert client.async_("server", "echo", moolink.lend("no array")).released.wait(20)


def test_sent_bytes_are_released_when_they_have_arrived(pair: Pair) -> None:
    client, server = pair
    kept: list[Any] = []
    server.define("keep", kept.append)
    array = np.random.default_rng(2).random(SIZE)  # no memory that could be mapped
    future = client.async_("server", "keep", moolink.lend(array))
    future.result()
    assert future.released.wait(20)
    expected = array.copy()
    array[:] = 0
    np.testing.assert_array_equal(kept[0], expected)


def test_replies_lend(neighbours: Pair) -> None:
    client, server = neighbours
    array, released = filled(), threading.Event()
    server.define("get", lambda: moolink.lend(array, on_release=released.set))
    result = client.sync("server", "get")
    np.testing.assert_array_equal(result, array)
    assert not result.flags.writeable
    assert not released.wait(0.05)
    del result
    gc.collect()
    assert released.wait(20)


def test_deferred_replies_and_items_of_streams_lend(neighbours: Pair) -> None:
    client, server = neighbours
    arrays, released = [filled(seed=i) for i in range(20)], threading.Semaphore(0)

    def items() -> Iterator[moolink.rpc.Lent]:
        for array in arrays:
            yield moolink.lend([array], on_release=released.release)

    async def async_items() -> AsyncIterator[moolink.rpc.Lent]:
        for lent in items():
            yield lent

    server.define("items", items)
    server.define("async_items", async_items)
    server.define_deferred(
        "deferred", lambda reply: reply(moolink.lend(arrays[0], on_release=released.release))
    )
    for function in ("items", "async_items"):
        for sent, (received,) in zip(arrays, client.stream("server", function), strict=True):
            assert not received.flags.writeable
            np.testing.assert_array_equal(received, sent)
    del received
    np.testing.assert_array_equal(client.sync("server", "deferred"), arrays[0])
    for _ in range(41):
        assert released.acquire(timeout=20)


def test_many_loans(neighbours: Pair) -> None:
    client, server = neighbours
    kept: list[Any] = []
    server.define("keep", lambda x: kept.append(x))
    arrays = [filled(8_000, seed=i) for i in range(300)]
    futures = [client.async_("server", "keep", moolink.lend(array)) for array in arrays]
    futures.append(client.async_("server", "keep", moolink.lend(arrays)))
    for future in futures:
        future.result()
    (listed,) = [value for value in kept if isinstance(value, list)]  # handlers end in any order
    for sent, received in zip(arrays, listed, strict=True):
        np.testing.assert_array_equal(received, sent)
    del listed
    assert loans(client) == 600
    kept.clear()
    del received
    for future in futures:
        assert future.released.wait(20)
    until(lambda: loans(client) + loans(server, "loans_held") == 0, "the returns")


def test_released_memory_is_used_again(neighbours: Pair) -> None:
    client, server = neighbours
    server.define("sum", lambda x: float(x.sum()))
    addresses = set()
    for i in range(20):
        array = filled(32 << 20 >> 2, seed=i)
        addresses.add(array.ctypes.data)
        future = client.async_("server", "sum", moolink.lend(array))
        assert future.result() == pytest.approx(float(array.sum()), rel=1e-4)
        del array
        assert future.released.wait(20)
    assert len(addresses) <= 3


def test_a_call_to_many_peers_is_released_by_the_last(neighbours: Pair) -> None:
    client, server = neighbours
    kept: list[Any] = []
    server.define("keep", kept.append)
    client.define("keep", lambda x: None)
    array = filled()
    futures = client.async_many(["server", "client"], "keep", moolink.lend(array))
    for future in futures.values():
        future.result()
    np.testing.assert_array_equal(kept[0], array)
    assert not any(future.released.done() for future in futures.values())
    kept.clear()
    assert all(future.released.wait(20) for future in futures.values())


def test_a_lender_that_calls_itself(neighbours: Pair) -> None:
    client, _ = neighbours
    kept: list[Any] = []
    client.define("keep", kept.append)
    array = filled()
    future = client.async_("client", "keep", moolink.lend(array))
    future.result()
    assert kept[0].ctypes.data == array.ctypes.data
    assert not kept[0].flags.writeable
    assert not future.released.done()
    kept.clear()
    assert future.released.wait(20)


def test_a_call_that_fails_releases(pair: Pair) -> None:
    client, server = pair
    server.define("raise", lambda x: x.nothing)
    count = threading.Semaphore(0)
    lent = moolink.lend(filled(), on_release=count.release)
    client.set_timeout(0.2)
    for peer, function in (("nobody", "f"), ("server", "missing"), ("server", "raise")):
        future = client.async_(peer, function, lent)
        with pytest.raises(moolink.Error):
            future.result()
        assert future.released.wait(20)
        assert count.acquire(timeout=20)
    assert not count.acquire(timeout=0.05)


def test_closing_the_borrower_releases(neighbours: Pair) -> None:
    client, server = neighbours
    kept: list[Any] = []
    server.define("keep", kept.append)
    array = filled()
    future = client.async_("server", "keep", moolink.lend(array))
    future.result()
    server.close()
    assert future.released.wait(20)
    np.testing.assert_array_equal(kept[0], array)  # still mapped
    kept.clear()


def test_released_can_be_awaited(neighbours: Pair) -> None:
    client, server = neighbours
    server.define("sum", lambda x: float(x.sum()))

    async def call() -> None:
        future = client.async_("server", "sum", moolink.lend(filled()))
        await future
        await asyncio.wait_for(future.released, 20)

    asyncio.run(call())


def test_torch_gets_and_gives_tensors(neighbours: Pair) -> None:
    torch = pytest.importorskip("torch")
    client, server = neighbours

    def double(tensor: Any) -> tuple[str, Any]:
        kind = type(tensor).__module__
        tensor *= 2  # a copy, which is its own
        return kind, tensor

    server.define("double", double)
    tensor = moolink.empty((300, 400), torch.bfloat16, arrays="torch")
    tensor[:] = 3
    future = client.async_("server", "double", moolink.lend(tensor))
    kind, result = future.result()
    assert kind == "torch"
    assert result.dtype == torch.bfloat16
    assert bool((result == 6).all())
    assert bool((tensor == 3).all())
    assert future.released.wait(20)


@pytest.mark.parametrize("dtype", ["float32", np.int64, np.dtype("uint8"), "bfloat16", bool])
def test_empty(dtype: Any) -> None:
    array = moolink.empty((3, 5, 7), dtype)
    assert array.shape == (3, 5, 7)
    assert array.dtype.name == (dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    assert array.ctypes.data % 64 == 0
    array[:] = 1
    assert (array == 1).all()


def test_empty_arrays_of_any_size() -> None:
    assert moolink.empty(0).shape == (0,)
    assert moolink.empty(()).shape == ()
    arrays = [moolink.empty(size, "uint8") for size in (1, 4096, 4097, 70 << 20) for _ in range(3)]
    for i, array in enumerate(arrays):
        array[-1] = i
    assert [int(array[-1]) for array in arrays] == list(range(len(arrays)))


def test_empty_refuses() -> None:
    with pytest.raises(TypeError, match="datetime64"):
        moolink.empty(3, "datetime64")
    with pytest.raises(ValueError, match="numpy"):
        moolink.empty(3, arrays="jax")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="shape"):
        moolink.empty((3, -1))
    with pytest.raises(MemoryError):
        moolink.empty(1 << 60, "uint8")


def test_only_calls_lend() -> None:
    with pytest.raises(TypeError, match="lend"):
        _core.encode(moolink.lend(np.zeros(100)))


KEEPER = """
    import moolink, sys
    server = moolink.Rpc("server")
    kept = []
    server.define("keep", kept.append)
    server.define("total", lambda: float(kept[0].sum()))
    print(server.listen("127.0.0.1:0")[0], flush=True)
    sys.stdin.read()
    """


def test_a_killed_borrower_releases(start: Start) -> None:
    process = start(KEEPER)
    assert process.stdout is not None
    with moolink.Rpc("client", timeout=20) as client:
        client.connect(process.stdout.readline().strip())
        until(lambda: client.explain("server")["path"] == "shm", "the shared memory path")
        array = filled()
        future = client.async_("server", "keep", moolink.lend(array))
        future.result()
        assert client.sync("server", "total") == pytest.approx(float(array.sum()), rel=1e-4)
        assert not future.released.done()
        process.kill()
        assert future.released.wait(20)


def test_what_a_killed_lender_lent_stays_valid(start: Start) -> None:
    kept: list[Any] = []
    with moolink.Rpc("server", timeout=20) as server:
        server.define("keep", lambda x: kept.append(x))
        process = start(f"""
            import moolink, numpy, sys, time
            client = moolink.Rpc("client")
            client.connect({server.listen("127.0.0.1:0")[0]!r})
            client.sync("server", "keep", None)
            while client.explain("server")["path"] != "shm":
                time.sleep(0.01)
            array = moolink.empty(1 << 20)
            array[:] = numpy.arange(1 << 20)
            client.sync("server", "keep", moolink.lend(array))
            print("kept", flush=True)
            sys.stdin.read()
            """)
        assert process.stdout is not None
        assert process.stdout.readline() == "kept\n"
        array = kept[1]
        assert loans(server, "loans_held") == 1
        process.send_signal(signal.SIGKILL)
        until(lambda: not server.peers(), "the client's end")
        np.testing.assert_array_equal(array, np.arange(1 << 20, dtype=np.float32))
        kept.clear()
        del array  # there is nobody to return it to


def test_a_forked_child_returns_nothing(neighbours: Pair) -> None:
    client, server = neighbours
    kept: list[Any] = []
    server.define("keep", kept.append)
    array = filled()
    future = client.async_("server", "keep", moolink.lend(array))
    future.result()
    child = os.fork()
    if child == 0:
        try:
            kept.clear()
            del array
            own = moolink.empty(10)  # of a pool of its own
            own[:] = 1
            gc.collect()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - the exit status tells
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(kept[0], array)
    assert not future.released.wait(0.2)
    kept.clear()
    assert future.released.wait(20)


def test_a_forked_child_holds_no_descriptor_of_lent_memory() -> None:
    arrays = [filled(), moolink.empty(70 << 20, "uint8")]
    before = {name for name in descriptors.of_moolink() if "moolink-lending" in name}
    assert len(before) >= 2
    assert descriptors.are_gone_in_a_forked_child(before)
    assert arrays
