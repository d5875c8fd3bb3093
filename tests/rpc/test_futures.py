"""Futures: read many times, awaited by many tasks, cancelled, interrupted."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest

import moolink
from tests.rpc.conftest import Pair, Start
from tests.waiting import PROCESS_LIMIT, until


def test_results_are_read_many_times(pair: Pair) -> None:
    client, server = pair
    server.define("zeros", np.zeros)
    future = client.async_("server", "zeros", 3)
    first = future.result()
    assert future.result() is first
    assert future.result(timeout=0) is first
    assert future.exception() is None
    assert future.done()
    assert future.wait(0)


def test_a_wait_that_expires_leaves_the_call_alone(pair: Pair) -> None:
    client, server = pair
    release = threading.Event()
    server.define("wait", lambda: release.wait(20))
    future = client.async_("server", "wait")
    assert future.wait(0.01) is False
    assert future.exception() is None
    with pytest.raises(moolink.TimeoutError, match="not done within") as caught:
        future.result(timeout=0.01)
    assert isinstance(caught.value, TimeoutError)
    release.set()
    assert future.result() is True


def test_errors_are_raised_every_time(pair: Pair) -> None:
    client, _ = pair
    future = client.async_("server", "nothing")
    for _ in range(2):
        with pytest.raises(moolink.NoSuchFunction):
            future.result()
    assert isinstance(future.exception(), moolink.NoSuchFunction)
    assert future.wait()


def test_cancel_reaches_the_handler(pair: Pair) -> None:
    client, server = pair
    calls: list[moolink.RpcDeferredReturn] = []
    server.define_deferred("later", lambda deferred: calls.append(deferred))
    future = client.async_("server", "later")
    until(lambda: len(calls) == 1, "the call")
    assert not calls[0].cancelled()
    assert future.cancel()
    with pytest.raises(moolink.CancelledError):
        future.result()
    until(calls[0].cancelled, "the cancellation")
    calls[0](1)  # too late, and harmless
    assert not future.cancel()
    with pytest.raises(moolink.CancelledError):
        future.result()


def test_many_threads_wait_for_one_future(pair: Pair) -> None:
    client, server = pair
    release = threading.Event()
    server.define("wait", lambda: release.wait(20))
    future = client.async_("server", "wait")
    results: list[object] = []
    threads = [threading.Thread(target=lambda: results.append(future.result())) for _ in range(5)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert results == [True] * 5


def test_threads_call_at_the_same_time(pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda x: x)
    wrong: list[object] = []

    def work(name: int) -> None:
        for i in range(200):
            if client.sync("server", "echo", (name, i)) != (name, i):
                wrong.append((name, i))

    threads = [threading.Thread(target=work, args=(t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_awaited_by_many_tasks_on_two_loops(pair: Pair) -> None:
    client, server = pair
    release = threading.Event()
    server.define("wait", lambda: release.wait(20))
    future = client.async_("server", "wait")

    async def wait() -> object:
        return await future

    async def many() -> list[object]:
        tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
        doomed = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        doomed.cancel()
        release.set()
        return [await task for task in tasks]

    other: list[object] = []
    thread = threading.Thread(target=lambda: other.append(asyncio.run(many())))
    thread.start()
    assert asyncio.run(many()) == [True] * 3
    thread.join()
    assert other == [[True] * 3]
    assert asyncio.run(wait()) is True  # done already


def test_an_event_loop_that_ends_before_what_it_waited_for(pair: Pair) -> None:
    client, server = pair
    release = threading.Event()
    server.define("wait", lambda: release.wait(20))
    future = client.async_("server", "wait")

    async def give_up() -> None:
        async def wait() -> object:
            return await future

        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)

    asyncio.run(give_up())
    gc.collect()  # The loop is gone, and what it watched with.
    release.set()
    assert future.result(timeout=10) is True


def test_await_raises(pair: Pair) -> None:
    client, _ = pair

    async def call() -> None:
        await client.async_("server", "nothing")

    with pytest.raises(moolink.NoSuchFunction):
        asyncio.run(call())


def test_done_callbacks(pair: Pair) -> None:
    client, server = pair
    server.define("one", lambda: 1)
    future = client.async_("server", "one")
    seen: list[object] = []
    future.add_done_callback(lambda f: seen.append(f.result()))
    future.result()
    future.add_done_callback(lambda f: seen.append(f.result()))
    until(lambda: seen == [1, 1], "both callbacks")


def test_ctrl_c_ends_a_wait(start: Start) -> None:
    process = start("""
        import moolink, os, signal, sys, threading
        rpc = moolink.Rpc()
        future = rpc.async_("nobody", "f")
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            future.result()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """)
    out, err = process.communicate(timeout=PROCESS_LIMIT)
    assert out == "interrupted\n", err
    assert process.returncode == 0


def test_an_event_loop_that_was_closed_while_it_watched_is_left_alone(start: Start) -> None:
    # In a process of its own: what completes the call would otherwise hang all of moolink.
    process = start(
        """
        import asyncio, gc, os, threading
        import moolink

        release = threading.Event()
        with moolink.Rpc("server") as server, moolink.Rpc("client") as client:
            server.define("wait", lambda: release.wait(20))
            client.connect(server.listen("127.0.0.1:0")[0])
            future = client.async_("server", "wait")

            async def look():
                try:
                    await asyncio.wait_for(future, 0.05)
                except asyncio.TimeoutError:
                    print("not yet")

            asyncio.run(look())
            gc.collect()
            open_before = len(os.listdir("/proc/self/fd"))
            asyncio.run(look())
            gc.collect()
            print(len(os.listdir("/proc/self/fd")) - open_before, "descriptors kept")
            release.set()
            print(future.result(10), client.sync("server", "wait"))
        """
    )
    assert process.communicate(timeout=PROCESS_LIMIT)[0] == (
        "not yet\nnot yet\n0 descriptors kept\nTrue True\n"
    )
