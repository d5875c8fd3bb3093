"""Futures: read many times, awaited by many tasks, cancelled, interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable

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
    calls: list[moolink.rpc.RpcDeferredReturn] = []
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


class Refused:
    """A value whose decoding fails."""


def _refuse(_: object) -> Refused:
    raise KeyError("it does not suit me")


moolink.register(Refused, name="tests:Refused", to_state=lambda _: None, from_state=_refuse)


class Watched:
    """An object that can be watched by a weak reference."""


def _gone(act: Callable[[Watched], object]) -> bool:
    """Whether a frame's objects are gone once `act` has raised there, without a collection."""

    def frame() -> weakref.ref[Watched]:
        watched = Watched()
        with contextlib.suppress(Exception):
            act(watched)
        return weakref.ref(watched)

    gc.disable()
    try:
        return frame()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("function", ["nothing", "refused"])
@pytest.mark.parametrize("how", ["result", "exception", "await"])
def test_an_error_does_not_keep_the_frame_that_got_it(pair: Pair, function: str, how: str) -> None:
    client, server = pair
    server.define("refused", Refused)

    def act(watched: Watched) -> None:
        future = client.async_("server", function)
        future.wait()
        watched.future = future  # type: ignore[attr-defined]
        for _ in range(3):
            with contextlib.suppress(moolink.Error):
                if how == "result":
                    future.result()
                elif how == "exception":
                    error = future.exception()
                    assert error is not None
                    try:
                        raise error
                    finally:
                        del error
                else:
                    asyncio.run(_read(future))

    async def _read(future: moolink.Future) -> None:
        with contextlib.suppress(moolink.Error):  # asyncio keeps those of whole tasks
            await future

    assert _gone(act)


def test_errors_of_decoding_are_raised_every_time(pair: Pair) -> None:
    client, server = pair
    server.define("refused", Refused)
    future = client.async_("server", "refused")
    lengths = []
    for _ in range(3):
        with pytest.raises(moolink.WireError, match=r"KeyError: .it does not suit me") as caught:
            future.result()
        error = future.exception()
        assert error is not caught.value
        assert (type(error), str(error)) == (moolink.WireError, str(caught.value))
        assert error.__traceback__ is None
        lengths.append(len(caught.traceback))
    assert lengths == [1] * 3  # that of this function


class Looped:
    """A value whose decoding calls a function that the test sets."""

    decode: Callable[[], object] = staticmethod(lambda: None)


moolink.register(
    Looped,
    name="tests:Looped",
    to_state=lambda _: None,
    from_state=lambda _: Looped.decode(),
)


@pytest.mark.parametrize("how", ["result", "exception", "await"])
def test_decoding_may_not_wait_for_its_own_future(
    pair: Pair, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = pair
    server.define("looped", Looped)
    future = client.async_("server", "looped")
    assert future.wait(20)
    told: list[object] = []

    async def read() -> object:
        return await future

    def decode() -> object:
        assert future.done()
        assert not future.cancel()
        future.add_done_callback(told.append)
        if how == "result":
            return future.result()
        if how == "exception":
            return future.exception()
        return asyncio.run(read())

    monkeypatch.setattr(Looped, "decode", staticmethod(decode))
    for _ in range(2):
        with pytest.raises(moolink.Error, match="its decoding asks for this value"):
            future.result()
    until(lambda: told == [future], "the callback")


def test_threads_that_decode_for_each_other_get_an_error(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = pair
    server.define("looped", Looped)
    futures = [client.async_("server", "looped") for _ in range(2)]
    assert all(future.wait(20) for future in futures)
    both = threading.Barrier(2)
    other = threading.local()

    def decode() -> object:
        both.wait(PROCESS_LIMIT)
        return other.future.result()

    monkeypatch.setattr(Looped, "decode", staticmethod(decode))
    errors: list[BaseException] = []

    def read(own: int) -> None:
        other.future = futures[1 - own]
        try:
            futures[own].result()
        except moolink.Error as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(own,), daemon=True) for own in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROCESS_LIMIT)
    assert len(errors) == 2
    assert all("its decoding asks for this value" in str(error) for error in errors)


def test_a_wait_for_another_threads_decoding_can_be_interrupted(start: Start) -> None:
    program = """
    import signal, threading
    import moolink

    decoding, release = threading.Event(), threading.Event()

    class Slow:
        pass

    def decode(_):
        decoding.set()
        release.wait()
        return "decoded"

    moolink.register(Slow, name="tests:Slow", to_state=lambda _: None, from_state=decode)
    with moolink.Rpc("server") as server, moolink.Rpc("client") as client:
        server.define("slow", Slow)
        client.connect(server.listen("127.0.0.1:0")[0])
        future = client.async_("server", "slow")
        thread = threading.Thread(target=future.result)
        thread.start()
        decoding.wait()
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
        try:
            future.result()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        release.set()
        thread.join()
        print(future.result(), flush=True)
    """
    process = start(program)
    output, _ = process.communicate(timeout=PROCESS_LIMIT)
    assert output.split() == ["interrupted", "decoded"]
