"""Streams: items in order, as many ahead as the caller takes, ended and closed from both sides."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import moolink
from tests.rpc.conftest import Pair, Start
from tests.waiting import PROCESS_LIMIT, until


def test_items_come_in_order_and_whole(pair: Pair) -> None:
    client, server = pair

    def count(n: int, size: int) -> Iterator[np.ndarray]:
        for i in range(n):
            yield np.full(size, i)

    server.define("count", count)
    for size in (1, 100_000):  # within the frame, and in memory granted by the receiver or chunks
        items = list(client.stream("server", "count", 100, size=size))
        assert [item.shape for item in items] == [(size,)] * 100
        assert all((item == i).all() for i, item in enumerate(items))
    assert list(client.stream("server", "count", 0, 1)) == []


def test_any_iterator_and_the_peer_itself() -> None:
    with moolink.Rpc("only") as rpc:
        rpc.define("pairs", lambda d: iter(d.items()))
        assert list(rpc.stream("only", "pairs", {"a": 1, "b": 2})) == [("a", 1), ("b", 2)]


def test_the_handler_is_only_a_few_items_ahead(pair: Pair) -> None:
    client, server = pair
    made: list[int] = []

    def numbers() -> Iterator[int]:
        for i in range(1000):
            made.append(i)
            yield i

    server.define("numbers", numbers)
    stream = client.stream("server", "numbers")
    assert next(stream) == 0
    until(lambda: len(made) >= 16, "the items ahead")
    assert [next(stream) for _ in range(20)] == list(range(1, 21))
    assert len(made) <= 21 + 16
    assert list(stream) == list(range(21, 1000))


def test_leaving_the_loop_closes_the_generator(pair: Pair) -> None:
    client, server = pair
    closed = threading.Event()

    def forever() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    server.define("forever", forever)
    for item in client.stream("server", "forever"):
        assert item == 1
        break
    gc.collect()
    assert closed.wait(20)
    closed.clear()
    with client.stream("server", "forever") as stream:
        next(stream)
    assert closed.wait(20)
    with pytest.raises(moolink.CancelledError):
        list(stream)


def test_an_exception_comes_after_the_items_before_it(pair: Pair) -> None:
    client, server = pair

    def fails() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("the third")

    server.define("fails", fails)
    stream = client.stream("server", "fails")
    items = []
    with pytest.raises(moolink.RemoteError, match="the third") as caught:
        for item in stream:
            items.append(item)
    assert items == [1, 2]
    assert "in fails" in caught.value.remote_traceback


def test_what_ends_a_stream_is_raised_once(pair: Pair) -> None:
    client, server = pair

    def fails() -> Iterator[int]:
        yield 1
        raise KeyError("the second")

    def forever() -> Iterator[int]:
        while True:
            yield 1

    server.define("fails", fails)
    server.define("forever", forever)
    stream = client.stream("server", "fails")
    assert next(stream) == 1
    with pytest.raises(moolink.RemoteError):
        next(stream)
    assert list(stream) == []
    stream.close()
    assert list(stream) == []

    closed = client.stream("server", "forever")
    closed.close()
    with pytest.raises(moolink.CancelledError):
        list(closed)
    assert list(closed) == []

    async def main() -> None:
        stream: AsyncIterator[int] = client.stream("server", "fails")
        assert await anext(stream) == 1
        with pytest.raises(moolink.RemoteError):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(main())


def test_an_item_that_cannot_travel_ends_the_stream_and_closes_the_generator(pair: Pair) -> None:
    client, server = pair
    closed = threading.Event()

    def strange() -> Iterator[object]:
        try:
            yield 1
            yield threading.Lock()
        finally:
            closed.set()

    server.define("strange", strange)
    stream = client.stream("server", "strange")
    assert next(stream) == 1
    with pytest.raises(moolink.RemoteError, match="lock"):
        next(stream)
    assert closed.wait(20)


def test_a_stream_of_what_yields_nothing_and_a_call_of_what_yields(pair: Pair) -> None:
    client, server = pair

    def generator() -> Iterator[int]:
        yield 1

    server.define("generator", generator)
    server.define("plain", lambda: 1)
    with pytest.raises(moolink.RemoteError, match="call it with stream"):
        client.sync("server", "generator")
    with pytest.raises(moolink.RemoteError, match="call it with async_ or sync"):
        list(client.stream("server", "plain"))
    with pytest.raises(moolink.NoSuchFunction):
        list(client.stream("server", "missing"))


@pytest.mark.parametrize("within", [False, True])
def test_the_time_limit_is_that_of_each_item(pair: Pair, within: bool) -> None:
    client, server = pair
    go_on = threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        go_on.wait(20)
        yield 2

    server.define("slow", slow)
    if not within:
        client.set_timeout(0.3)
    calls = client.within(0.3) if within else client
    stream = calls.stream("server", "slow")
    assert next(stream) == 1
    with pytest.raises(moolink.TimeoutError, match="without another item"):
        next(stream)
    go_on.set()


def test_many_streams_at_once_and_calls_between(pair: Pair) -> None:
    client, server = pair
    server.define("numbers", lambda n: iter(range(n)))
    server.define("echo", lambda x: x)
    streams = [client.stream("server", "numbers", 50 + i) for i in range(20)]
    assert client.sync("server", "echo", 5) == 5
    for i, stream in enumerate(streams):
        assert list(stream) == list(range(50 + i))


def test_async_for(pair: Pair) -> None:
    client, server = pair
    server.define("numbers", lambda n: iter(range(n)))

    async def collect(n: int) -> list[int]:
        return [item async for item in client.stream("server", "numbers", n)]

    async def main() -> list[list[int]]:
        return list(await asyncio.gather(collect(100), collect(3), collect(0)))

    assert asyncio.run(main()) == [list(range(100)), [0, 1, 2], []]


def test_a_task_that_is_cancelled_leaves_the_stream_usable(pair: Pair) -> None:
    client, server = pair
    go_on = threading.Event()

    def slow() -> Iterator[int]:
        go_on.wait(20)
        yield 7

    server.define("slow", slow)

    async def main() -> int:
        stream: AsyncIterator[int] = client.stream("server", "slow")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.05)
        go_on.set()
        return await anext(stream)

    assert asyncio.run(main()) == 7


def test_loss_of_the_peer_ends_the_stream(start: Start) -> None:
    process = start("""
        import moolink
        def forever():
            while True:
                yield 1
        rpc = moolink.Rpc("server")
        rpc.define("forever", forever)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        input()
        """)
    assert process.stdout is not None
    with moolink.Rpc("client", timeout=20) as client:
        client.connect(process.stdout.readline().strip())
        stream = client.stream("server", "forever")
        assert next(stream) == 1
        process.kill()
        with pytest.raises(moolink.PeerLost):
            for _ in stream:
                pass


@pytest.mark.parametrize("how", ["pass", "rpc.close()", "del rpc"])
@pytest.mark.parametrize("define", ["def", "async def"])
def test_a_server_that_ends_in_the_midst_of_a_stream(start: Start, define: str, how: str) -> None:
    process = start(f"""
        import moolink
        {define} forever():
            i = 0
            while True:
                yield i
                i += 1
        rpc = moolink.Rpc("server")
        rpc.define("forever", forever)
        print(rpc.listen("127.0.0.1:0")[0], flush=True)
        input()
        {how}
        """)
    assert process.stdout is not None
    assert process.stdin is not None
    with moolink.Rpc("client", timeout=20) as client:
        client.connect(process.stdout.readline().strip())
        stream = client.stream("server", "forever")
        assert next(stream) == 0
        process.stdin.write("\n")
        process.stdin.flush()
        with pytest.raises(moolink.PeerLost):
            for _ in stream:
                pass
    _, err = process.communicate(timeout=PROCESS_LIMIT)
    assert process.returncode == 0
    assert err == ""


def test_close_of_either_side_ends_streams() -> None:
    server = moolink.Rpc("server")
    closed = threading.Event()

    def forever() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    server.define("forever", forever)
    client = moolink.Rpc("client")
    client.connect(server.listen("127.0.0.1:0")[0])
    own = server.stream("server", "forever")
    stream = client.stream("server", "forever")
    assert next(stream) == next(own) == 1
    client.close()
    with pytest.raises(moolink.Closed):
        list(stream)
    assert closed.wait(20)
    closed.clear()
    server.close()
    assert closed.wait(20)
    with pytest.raises(moolink.Closed):
        list(own)


def test_an_async_generator(pair: Pair) -> None:
    client, server = pair
    closed = threading.Event()

    async def numbers(n: int) -> AsyncIterator[int]:
        try:
            for i in range(n):
                await asyncio.sleep(0)
                yield i
        finally:
            closed.set()

    server.define("numbers", numbers)
    assert list(client.stream("server", "numbers", 100)) == list(range(100))
    assert closed.wait(20)
    closed.clear()
    with client.stream("server", "numbers", 10**9) as stream:
        assert [next(stream) for _ in range(50)] == list(range(50))
    assert closed.wait(20)
    with pytest.raises(moolink.RemoteError, match="call it with stream"):
        client.sync("server", "numbers", 1)


def test_an_async_generator_that_waits_is_closed_when_nobody_listens(pair: Pair) -> None:
    client, server = pair
    closed = threading.Event()

    async def silent() -> AsyncIterator[int]:
        yield 1
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def fails() -> AsyncIterator[object]:
        yield 1
        yield threading.Lock()

    server.define("silent", silent)
    server.define("fails", fails)
    with client.stream("server", "silent") as stream:
        assert next(stream) == 1
    assert closed.wait(20)
    with pytest.raises(moolink.RemoteError, match="lock"):
        list(client.stream("server", "fails"))
    with pytest.raises(ValueError, match="neither deferred nor batched"):
        server.define("batched", fails, batch_size=2)
