"""os.fork inside of handlers: how the child ends, and what the parent goes on with."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import moolink
from tests import forks
from tests.rpc.conftest import Pair, Start
from tests.waiting import TIMEOUT

Leave = Callable[[], None]


def fail() -> None:
    raise ValueError("raised in the child")


WAYS: dict[str, tuple[Leave, int]] = {
    "return": (lambda: None, 0),
    "exception": (fail, 1),
    "sys.exit()": (sys.exit, 0),
    "sys.exit(3)": (lambda: sys.exit(3), 3),
    "sys.exit(text)": (lambda: sys.exit("why"), 1),
    "os._exit": (lambda: os._exit(4), 4),
}


def fork(leave: Leave) -> int:
    """Returns the child's pid in the parent; the child leaves."""
    pid = os.fork()
    if pid == 0:
        leave()
    return pid


def define_plain(server: moolink.Rpc, leave: Leave) -> None:
    server.define("fork", lambda: fork(leave))


def define_deferred(server: moolink.Rpc, leave: Leave) -> None:
    def handler(reply: Any) -> None:
        if pid := fork(leave):
            reply(pid)

    server.define_deferred("fork", handler)


def define_batched(server: moolink.Rpc, leave: Leave) -> None:
    server.define("fork", lambda: fork(leave), batch_size=1)


def define_generator(server: moolink.Rpc, leave: Leave) -> None:
    def handler() -> Iterator[int]:
        yield fork(leave)

    server.define("fork", handler)


def define_async(server: moolink.Rpc, leave: Leave) -> None:
    async def handler() -> int:
        return fork(leave)

    server.define("fork", handler)


def define_async_generator(server: moolink.Rpc, leave: Leave) -> None:
    async def handler() -> AsyncIterator[int]:
        if pid := fork(leave):
            yield pid

    server.define("fork", handler)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "define", [define_plain, define_deferred, define_batched, define_async, define_async_generator]
)
def test_a_child_ends_where_its_handler_ends(
    pair: Pair, define: Callable[[moolink.Rpc, Leave], None], way: str
) -> None:
    client, server = pair
    leave, status = WAYS[way]
    define(server, leave)
    server.define("echo", lambda x: x)
    if define is define_async_generator:
        (pid,) = client.stream("server", "fork")
    else:
        pid = int(client.sync("server", "fork"))
    assert forks.exit_status(pid) == status
    assert client.sync("server", "echo", 1) == 1


@pytest.mark.parametrize("way", ["exception", "sys.exit(3)", "os._exit"])
def test_a_child_ends_where_its_generator_raises(pair: Pair, way: str) -> None:
    client, server = pair
    leave, status = WAYS[way]
    define_generator(server, leave)
    (pid,) = client.stream("server", "fork")
    assert forks.exit_status(pid) == status


def test_a_generator_that_goes_on_in_the_child_ends_it_with_its_item(pair: Pair) -> None:
    client, server = pair
    define_generator(server, lambda: None)
    (pid,) = client.stream("server", "fork")
    assert forks.exit_status(pid) == 0


def test_a_child_ends_where_its_callback_ends(pair: Pair) -> None:
    client, server = pair
    server.define("echo", lambda x: x)
    pids: queue.SimpleQueue[int] = queue.SimpleQueue()
    client.async_("server", "echo", 1).add_done_callback(
        lambda future: pids.put(fork(lambda: None))
    )
    assert forks.exit_status(pids.get(timeout=TIMEOUT)) == 0


def test_what_the_child_has_printed_is_there_once(start: Start) -> None:
    process = start(
        """
        import os
        import moolink

        server, client = moolink.Rpc("server"), moolink.Rpc("client")

        def handler():
            pid = os.fork()
            if pid == 0:
                print("from the child")
            else:
                os.waitpid(pid, 0)

        server.define("fork", handler)
        client.connect(server.listen("127.0.0.1:0")[0])
        client.sync("server", "fork")
        print("from the parent")
        """
    )
    output, errors = process.communicate(timeout=TIMEOUT)
    assert sorted(output.splitlines()) == ["from the child", "from the parent"], errors
    assert process.returncode == 0


def test_the_parents_handlers_run_once_each(start: Start) -> None:
    """Calls that wait for the worker that forks are the parent's alone."""
    process = start(
        """
        import os
        import sys
        import threading
        import moolink

        moolink.set_max_threads(1)
        server, client = moolink.Rpc("server"), moolink.Rpc("client")
        all_sent = threading.Event()

        def fork():
            all_sent.wait()
            return os.fork()

        server.define("fork", fork)
        server.define("note", lambda n: os.write(1, f"{n}\\n".encode()))
        client.connect(server.listen("127.0.0.1:0")[0])
        forked = client.async_("server", "fork")
        noted = [client.async_("server", "note", n) for n in range(50)]
        while server.stats()["calls_running"] < 51:
            pass
        all_sent.set()
        pid = forked.result()
        for future in noted:
            future.result()
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    )
    output, errors = process.communicate(timeout=TIMEOUT)
    assert output.split() == [str(n) for n in range(50)], errors
    assert process.returncode == 0
