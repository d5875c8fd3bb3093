"""Handlers that reply themselves, and what counts as an error in a reply."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import moolink
from tests.rpc.conftest import Pair
from tests.waiting import TIMEOUT, until


def test_cancel_callbacks(pair: Pair) -> None:
    client, server = pair
    calls: list[moolink.rpc.RpcDeferredReturn] = []
    told: list[str] = []
    server.define_deferred("later", lambda deferred: calls.append(deferred))
    answered, cancelled = client.async_("server", "later"), client.async_("server", "later")
    until(lambda: len(calls) == 2, "the calls")
    calls[0].add_cancel_callback(lambda: told.append("answered"))
    calls[0](1)
    assert answered.result() == 1
    calls[0].add_cancel_callback(lambda: told.append("answered"))
    for i in range(2):
        calls[1].add_cancel_callback(lambda i=i: told.append(f"before {i}"))
    cancelled.cancel()
    until(lambda: len(told) == 2, "the callbacks")
    calls[1].add_cancel_callback(lambda: told.append("after"))
    until(lambda: len(told) == 3, "the late callback")
    assert told == ["before 0", "before 1", "after"]


def test_cancel_callbacks_beside_replies_of_another_thread(pair: Pair) -> None:
    """The interpreter switches threads, and the engine is busy, as often as can be."""
    client, server = pair
    calls: queue.SimpleQueue[moolink.rpc.RpcDeferredReturn | None] = queue.SimpleQueue()

    def later(deferred: moolink.rpc.RpcDeferredReturn) -> None:
        calls.put(deferred)
        deferred.add_cancel_callback(lambda: None)

    def reply() -> None:
        while (deferred := calls.get()) is not None:
            deferred(1)

    def keep_busy() -> None:
        while not over.is_set():
            client.sync("server", "echo", 1)

    server.define_deferred("later", later)
    server.define("echo", lambda x: x)
    over, threads = threading.Event(), [threading.Thread(target=reply)]
    threads += [threading.Thread(target=keep_busy) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(20):
            futures = [client.async_("server", "later") for _ in range(100)]
            assert [future.result(TIMEOUT) for future in futures] == [1] * 100
    finally:
        over.set()
        calls.put(None)
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)


def test_a_cancel_callback_that_raises_harms_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = pair
    calls: list[moolink.rpc.RpcDeferredReturn] = []
    unraisable: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda args: unraisable.append(args.exc_value))
    server.define_deferred("later", lambda deferred: calls.append(deferred))
    future = client.async_("server", "later")
    until(lambda: len(calls) == 1, "the call")
    calls[0].add_cancel_callback(lambda: 1 / 0)
    future.cancel()
    until(lambda: len(unraisable) == 1, "the hook")
    assert isinstance(unraisable[0], ZeroDivisionError)


def test_a_callback_that_refers_to_its_deferred_is_collected(pair: Pair) -> None:
    client, server = pair

    class Callback:
        def __init__(self, deferred: moolink.rpc.RpcDeferredReturn) -> None:
            self.deferred = deferred

        def __call__(self) -> None: ...

    def drop(deferred: moolink.rpc.RpcDeferredReturn) -> None:
        callback = Callback(deferred)
        callbacks.append(weakref.ref(callback))
        deferred.add_cancel_callback(callback)

    def reply(deferred: moolink.rpc.RpcDeferredReturn) -> None:
        drop(deferred)
        deferred(1)

    callbacks: list[weakref.ref[Callback]] = []
    server.define_deferred("drop", drop)
    server.define_deferred("reply", reply)
    assert client.sync("server", "reply") == 1
    until(lambda: callbacks[0]() is None, "the callback, which the reply has freed")
    future = client.async_("server", "drop")
    until(lambda: len(callbacks) == 2, "the call")
    until(lambda: gc.collect() >= 0 and callbacks[1]() is None, "the collector", poll=0.05)
    with pytest.raises(moolink.RemoteError, match="without a reply"):
        future.result()


def test_rejected_calls(pair: Pair) -> None:
    client, server = pair
    server.define_deferred("picky", lambda deferred, x: deferred.reject(f"{x} is odd"))
    with pytest.raises(moolink.RemoteError) as caught:
        client.sync("server", "picky", 3)
    assert str(caught.value).startswith("the call of 'picky' was refused: 3 is odd")
    assert caught.value.remote_type == "ValueError"
    assert caught.value.ran == "no"


@pytest.mark.parametrize("batched", [False, True])
def test_what_is_raised_after_the_reply_is_logged(
    pair: Pair, caplog: pytest.LogCaptureFixture, batched: bool
) -> None:
    client, server = pair

    def wrong(deferred: Any) -> None:
        deferred(1)
        raise ValueError("after the reply")

    server.define_deferred("wrong", wrong, batch_size=1 if batched else None)
    with caplog.at_level(logging.ERROR, "moolink"):
        assert client.sync("server", "wrong") == 1
        until(lambda: len(caplog.records) == 1, "the log")
    record = caplog.records[0]
    assert "'wrong' raised ValueError('after the reply') after its reply" in record.getMessage()
    assert record.exc_info is not None
    assert "in wrong" in logging.Formatter().formatException(record.exc_info)


def plainly(server: moolink.Rpc, value: object) -> None:
    server.define("f", lambda: value)


def as_a_task(server: moolink.Rpc, value: object) -> None:
    async def f() -> object:
        await asyncio.sleep(0)
        return value

    server.define("f", f)


def later(server: moolink.Rpc, value: object) -> None:
    server.define_deferred("f", lambda deferred: deferred(value))


def from_a_queue(server: moolink.Rpc, value: object) -> None:
    queue = server.define_queue("f")
    threading.Thread(target=lambda: queue.get(TIMEOUT)[0](value)).start()


def in_a_batch(server: moolink.Rpc, value: object) -> None:
    server.define("f", lambda: value, batch_size=1)


def as_an_entry(server: moolink.Rpc, value: object) -> None:
    server.define("f", lambda: [value], batch_size=1)


@pytest.mark.parametrize(
    "serve", [plainly, as_a_task, later, from_a_queue, in_a_batch, as_an_entry]
)
def test_an_exception_as_the_reply_is_raised(
    pair: Pair, serve: Callable[[moolink.Rpc, object], None]
) -> None:
    client, server = pair
    serve(server, LookupError("no such thing"))
    with pytest.raises(moolink.RemoteError, match="LookupError: no such thing") as caught:
        client.sync("server", "f")
    assert caught.value.remote_type == "LookupError"
