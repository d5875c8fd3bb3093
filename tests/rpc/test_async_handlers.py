"""Handlers that are coroutine functions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import weakref

import pytest

import moolink
from tests import descriptors
from tests.rpc.conftest import Pair, Start
from tests.waiting import TIMEOUT, until


class Sleeper:
    """A handler that sleeps until it is cancelled."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self) -> None:
        self.started.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_without_a_loop_they_run_on_one_thread_of_moolink(pair: Pair) -> None:
    client, server = pair

    async def where(x: int) -> tuple[int, str]:
        await asyncio.sleep(0)
        return x, threading.current_thread().name

    server.define("where", where)
    server.define("partial", functools.partial(where, 7))
    assert client.sync("server", "where", 1) == (1, "moolink-asyncio")
    assert client.sync("server", "where", x=2) == (2, "moolink-asyncio")
    assert client.sync("server", "partial") == (7, "moolink-asyncio")


def test_they_run_on_the_loop_that_runs_at_the_definition(pair: Pair) -> None:
    client, server = pair

    async def main() -> None:
        here = asyncio.get_running_loop()

        async def handler(x: int) -> int:
            assert asyncio.get_running_loop() is here
            return x + 1

        server.define("f", handler)
        assert await client.async_("server", "f", 1) == 2
        futures = [client.async_("server", "f", i) for i in range(100)]
        assert await asyncio.gather(*map(asyncio.ensure_future, futures)) == list(range(1, 101))

    asyncio.run(main())
    with pytest.raises(moolink.RemoteError, match="event loop that ran 'f' is closed"):
        client.sync("server", "f", 1)
    server.undefine("f")


def test_they_overlap_and_start_in_order(pair: Pair) -> None:
    client, server = pair
    begun: list[int] = []
    all_here = asyncio.Event()

    async def meet(i: int) -> int:
        begun.append(i)
        if len(begun) == 20:
            all_here.set()
        await all_here.wait()
        return i

    server.define("meet", meet)
    futures = [client.async_("server", "meet", i) for i in range(20)]
    assert [f.result() for f in futures] == list(range(20))
    assert begun == list(range(20))


def test_they_await_other_calls(pair: Pair) -> None:
    client, server = pair

    async def down(depth: int) -> int:
        return 0 if depth == 0 else 1 + await client.async_("server", "up", depth - 1)

    async def up(depth: int) -> int:
        return 0 if depth == 0 else 1 + await server.async_("client", "down", depth - 1)

    client.define("down", down)
    server.define("up", up)
    assert client.sync("server", "up", 20) == 20


def test_what_they_raise_is_raised_at_the_caller(pair: Pair) -> None:
    client, server = pair

    async def fail(x: int) -> None:
        await asyncio.sleep(0)
        raise LookupError(f"no such thing: {x}")

    async def leave() -> None:
        exit(3)

    async def give_up() -> None:
        raise asyncio.CancelledError

    server.define("fail", fail)
    with pytest.raises(moolink.RemoteError, match="no such thing: 7") as caught:
        client.sync("server", "fail", 7)
    assert caught.value.remote_type == "LookupError"
    assert "in fail" in caught.value.remote_traceback
    with pytest.raises(moolink.RemoteError, match="argument") as caught:
        client.sync("server", "fail")
    assert caught.value.remote_type == "TypeError"
    server.define("leave", leave)
    with pytest.raises(moolink.RemoteError) as caught:
        client.sync("server", "leave")
    assert caught.value.remote_type == "SystemExit"
    server.define("give_up", give_up)
    with pytest.raises(moolink.RemoteError, match="was cancelled"):
        client.sync("server", "give_up")
    with pytest.raises(moolink.RemoteError, match="no such thing: 8"):
        client.sync("server", "fail", 8)


def test_an_object_with_an_async_call_is_one(pair: Pair) -> None:
    client, server = pair

    class Double:
        async def __call__(self, x: int) -> int:
            return 2 * x

        async def method(self, x: int) -> int:
            return 3 * x

    server.define("double", Double())
    server.define("triple", Double().method)
    assert client.sync("server", "double", 4) == 8
    assert client.sync("server", "triple", 4) == 12


def test_deferred_ones_answer_themselves(pair: Pair) -> None:
    client, server = pair

    async def later(deferred: moolink.rpc.RpcDeferredReturn, x: int) -> None:
        if x < 0:
            raise ValueError("negative")
        if x:
            deferred(x)

    server.define_deferred("later", later)
    assert client.sync("server", "later", 5) == 5
    with pytest.raises(moolink.RemoteError, match="negative"):
        client.sync("server", "later", -1)
    with pytest.raises(moolink.RemoteError, match="without a reply"):
        client.sync("server", "later", 0)


def test_what_goes_wrong_after_the_reply_is_the_loops(pair: Pair) -> None:
    client, server = pair
    reported: list[object] = []

    async def wrong(deferred: moolink.rpc.RpcDeferredReturn) -> None:
        deferred(1)
        raise ValueError("after the reply")

    async def goes_on(deferred: moolink.rpc.RpcDeferredReturn) -> None:
        deferred(2)
        await asyncio.sleep(1000)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context.get("exception")))
        server.define_deferred("wrong", wrong)
        server.define_deferred("goes_on", goes_on)
        assert await client.async_("server", "wrong") == 1
        assert await client.async_("server", "goes_on") == 2

    asyncio.run(main())
    gc.collect()
    assert [str(error) for error in reported] == ["after the reply"]


# --- cancellation


def test_cancelling_the_call_cancels_the_task(pair: Pair) -> None:
    client, server = pair
    sleeper = Sleeper()
    server.define("sleep", sleeper)
    future = client.async_("server", "sleep")
    assert sleeper.started.wait(TIMEOUT)
    assert future.cancel()
    assert sleeper.cancelled.wait(TIMEOUT)


def test_a_time_out_cancels_the_task(pair: Pair) -> None:
    client, server = pair
    sleeper = Sleeper()
    server.define("sleep", sleeper)
    client.set_timeout(0.2)
    with pytest.raises(moolink.TimeoutError):
        client.sync("server", "sleep")
    assert sleeper.cancelled.wait(TIMEOUT)


def test_the_death_of_the_caller_cancels_the_task(start: Start) -> None:
    sleeper = Sleeper()
    with moolink.Rpc("server") as server:
        server.define("sleep", sleeper)
        address = server.listen("127.0.0.1:0")[0]
        caller = start(
            f"""
            import moolink
            with moolink.Rpc("client", timeout=60) as client:
                client.connect({address!r})
                client.sync("server", "sleep")
            """
        )
        assert sleeper.started.wait(TIMEOUT)
        assert not sleeper.cancelled.is_set()
        caller.kill()
        assert sleeper.cancelled.wait(TIMEOUT)


def test_closing_the_server_cancels_the_task(pair: Pair) -> None:
    client, server = pair
    sleeper = Sleeper()
    server.define("sleep", sleeper)
    future = client.async_("server", "sleep")
    assert sleeper.started.wait(TIMEOUT)
    server.close()
    assert sleeper.cancelled.wait(TIMEOUT)
    with pytest.raises(moolink.PeerLost):
        future.result()


# --- ends


def test_undefine_waits_for_tasks(pair: Pair) -> None:
    client, server = pair
    started, release = threading.Event(), threading.Event()
    ended: list[str] = []

    async def slow() -> str:
        started.set()
        while not release.is_set():
            await asyncio.sleep(0.01)
        ended.append("ended")
        return "done"

    server.define("slow", slow)
    future = client.async_("server", "slow")
    assert started.wait(TIMEOUT)
    threading.Timer(0.05, release.set).start()
    server.undefine("slow")
    assert ended == ["ended"]
    assert future.result() == "done"
    with pytest.raises(moolink.NoSuchFunction):
        client.sync("server", "slow")


def test_undefine_on_the_loop_does_not_wait(pair: Pair) -> None:
    client, server = pair

    async def once() -> str:
        server.undefine("once")
        return "done"

    server.define("once", once)
    assert client.sync("server", "once") == "done"


def test_close_waits_a_moment_for_tasks(pair: Pair) -> None:
    client, server = pair
    started = threading.Event()

    async def slow() -> str:
        started.set()
        await asyncio.sleep(0.05)
        return "flushed"

    server.define("slow", slow)
    future = client.async_("server", "slow")
    assert started.wait(TIMEOUT)
    server.close()
    assert future.result() == "flushed"


def test_a_peer_that_its_tasks_refer_to_is_collected() -> None:
    class Holder:
        def __init__(self) -> None:
            self.rpc = moolink.Rpc()
            self.rpc.define("f", self.f)
            self.rpc.define("g", self.f, batch_size=2)

        async def f(self) -> None: ...

    holder = Holder()
    seen = weakref.ref(holder)
    del holder
    gc.collect()
    assert seen() is None


def test_tasks_leave_nothing_behind(pair: Pair) -> None:
    client, server = pair

    class Value:
        pass

    class Handler:
        async def __call__(self, x: int) -> int:
            value = Value()
            values.append(weakref.ref(value))
            await asyncio.sleep(0)
            if x % 2:
                raise ValueError(str(x))
            return x

    values: list[weakref.ref[Value]] = []
    handler = Handler()
    seen = weakref.ref(handler)
    server.define("f", handler)
    futures = [client.async_("server", "f", i) for i in range(10)]
    assert [f.exception() is None for f in futures if f.wait()] == [True, False] * 5
    server.undefine("f")
    del handler, futures
    gc.collect()
    until(lambda: not any(v() for v in values), "the tasks' memory", poll=0.05)
    until(lambda: gc.collect() >= 0 and seen() is None, "the handler", poll=0.05)


EXITS = {
    "idle": "client.sync('server', 'quick')",
    "with a task that sleeps": "client.async_('server', 'sleep'); started.wait(20)",
    "with a task that clings to life": "client.async_('server', 'cling'); started.wait(20)",
}


@pytest.mark.parametrize("how", EXITS)
def test_the_loop_does_not_keep_the_interpreter(start: Start, how: str) -> None:
    child = start(
        f"""
        import asyncio, threading, moolink
        started = threading.Event()
        server, client = moolink.Rpc("server"), moolink.Rpc("client", timeout=60)
        client.connect(server.listen("127.0.0.1:0")[0])

        async def quick(): return 1

        async def sleep():
            started.set()
            await asyncio.sleep(1000)

        async def cling():
            started.set()
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    pass

        for f in quick, sleep, cling:
            server.define(f.__name__, f)
        {EXITS[how]}
        print("leaving", flush=True)
        """
    )
    out, err = child.communicate(timeout=TIMEOUT)
    assert child.returncode == 0, err
    assert out == "leaving\n"
    assert "Traceback" not in err


def test_a_forked_child_holds_no_descriptors_of_the_loop(pair: Pair) -> None:
    _, server = pair

    async def f() -> None: ...

    server.define("f", f)
    assert descriptors.are_gone_in_a_forked_child(descriptors.of_moolink())


def test_a_forked_child_has_a_loop_of_its_own(start: Start) -> None:
    child = start(
        """
        import os, moolink

        async def f(x): return x

        def serve():
            with moolink.Rpc("server") as server, moolink.Rpc("client", timeout=20) as client:
                client.connect(server.listen("127.0.0.1:0")[0])
                server.define("f", f)
                return client.sync("server", "f", os.getpid()) == os.getpid()

        assert serve()
        pid = os.fork()
        if pid == 0:
            print("child", serve(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        print("parent", serve())
        """
    )
    out, err = child.communicate(timeout=TIMEOUT)
    assert out == "child True\nparent True\n", err


@pytest.mark.parametrize("dynamic", [False, True])
def test_calls_fail_when_the_loop_that_runs_them_ends(dynamic: bool) -> None:
    with moolink.Rpc("server") as server:
        futures = []

        async def main() -> None:
            started = asyncio.Event()

            async def wait(x: object) -> object:
                started.set()
                await asyncio.sleep(1000)
                return x

            server.define("wait", wait, dynamic_batching=dynamic)
            futures.append(server.async_("server", "wait", 1))
            await started.wait()
            # In a dynamic batch, these wait for the end of the one before.
            futures.extend(server.async_("server", "wait", i) for i in range(3))
            arrived = server.async_("server", "wait", 4)
            futures.append(arrived)
            await asyncio.sleep(0)

        asyncio.run(main())
        for future in futures:
            with pytest.raises(moolink.RemoteError, match=r"was cancelled|event loop .* is closed"):
                future.result(20)
        with pytest.raises(moolink.RemoteError, match=r"event loop .* is closed"):
            server.async_("server", "wait", 5).result(20)


def test_a_call_that_comes_while_the_loop_ends_fails() -> None:
    with moolink.Rpc("server") as server:
        ending = threading.Event()
        called = threading.Event()

        def block() -> None:
            ending.set()
            called.wait(20)

        async def main() -> None:
            async def echo(x: object) -> object:
                return x

            server.define("echo", echo)
            assert await server.async_("server", "echo", 1) == 1
            # asyncio.run waits for its executor last, when the loop still takes callbacks.
            asyncio.get_running_loop().run_in_executor(None, block)

        runner = threading.Thread(target=asyncio.run, args=(main(),))
        runner.start()
        assert ending.wait(20)
        future = server.async_("server", "echo", 2)
        with contextlib.suppress(moolink.RemoteError):
            future.result(20)  # it was in time, or it failed; it does not hang
        called.set()
        runner.join(20)
        with pytest.raises(moolink.RemoteError, match=r"event loop .* is closed"):
            server.async_("server", "echo", 3).result(20)
