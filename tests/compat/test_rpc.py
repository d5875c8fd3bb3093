"""What moolib's Rpc does and moolink's does not."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import moolib
import pytest
import torch

import moolink
from moolink.compat.moolib import futures
from tests import forks
from tests.compat.conftest import PACKAGE, Peers
from tests.waiting import PROCESS_LIMIT, TIMEOUT, until


class Server:
    """An object whose methods its peer serves, as in many of moolib's programs."""

    def __init__(self) -> None:
        self.rpc = moolib.Rpc("server")
        self.rpc.define("double", self.double)
        self.rpc.define("half", self.half)
        self.rpc.define_deferred("later", self.later)
        self.address = self.rpc.listen("127.0.0.1:0")[0]

    def double(self, x: int) -> int:
        """A handler."""
        return 2 * x

    async def half(self, x: int) -> int:
        """A handler that is a task."""
        return x // 2

    def later(self, reply: moolib.RpcDeferredReturn, x: int) -> None:
        """A handler that replies by its first argument."""
        reply(x)


def test_a_peer_without_references_is_gone_at_once() -> None:
    gc.disable()
    try:
        server = Server()
        with moolib.Rpc("client", timeout=20) as client:
            client.connect(server.address)
            assert client.sync("server", "double", 4) == 8
            assert client.sync("server", "half", 4) == 2
            assert client.sync("server", "later", 4) == 4
            gone = weakref.ref(server.rpc)
            # A thread that has just run a handler may still hold it for a moment.
            del server
            until(lambda: gone() is None, "the end of the peer")
            # A client that has noticed it already looks for another peer of this name.
            with pytest.raises((moolink.PeerLost, moolink.TimeoutError)):
                client.async_("server", "double", 1).result(2)
    finally:
        gc.enable()


def test_a_method_of_another_object_is_kept(peers: Peers) -> None:
    class Adder:
        """It does not refer to the peer."""

        def add(self, x: int) -> int:
            return x + 1

    host, client = peers
    host.define("add", Adder().add)
    gc.collect()
    assert client.sync("host", "add", 1) == 2


def test_a_method_whose_object_is_gone_says_so(peers: Peers) -> None:
    class Holder:
        """It refers to the peer, and nobody keeps it."""

        def __init__(self, rpc: moolib.Rpc) -> None:
            self.rpc = rpc
            rpc.define("f", self.f)

        def f(self) -> None:
            """A handler."""

    host, client = peers
    Holder(host)
    with pytest.raises(moolink.RemoteError, match=r"Holder\.f was defined is gone: keep it"):
        client.sync("host", "f")


@pytest.fixture
def early(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Peers with as much grace as a test takes."""
    monkeypatch.setattr(futures, "GRACE", TIMEOUT)
    return peers


@pytest.fixture
def refused(early: Peers, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event: a call has found that its peer has no such function."""
    event = threading.Event()
    is_early = futures.Met.is_early

    def noted(met: futures.Met, peer: str, function: str, error: BaseException | None) -> bool:
        if isinstance(error, moolink.NoSuchFunction):
            event.set()
        return is_early(met, peer, function, error)

    monkeypatch.setattr(futures.Met, "is_early", noted)
    return event


def defined_after(
    refused: threading.Event, host: moolib.Rpc, name: str, function: Any
) -> threading.Thread:
    """Defines a function once a call of it was refused."""

    def define() -> None:
        if refused.wait(TIMEOUT):
            host.define(name, function)

    thread = threading.Thread(target=define)
    thread.start()
    return thread


def test_a_function_defined_just_after_listen_is_found(
    early: Peers, refused: threading.Event
) -> None:
    host, client = early
    x = torch.ones(3)
    future = client.async_("host", "total", x)
    x.zero_()  # What was sent first is sent again.
    assert isinstance(future, moolib.Future)
    thread = defined_after(refused, host, "total", lambda x: float(x.sum()))
    assert future.result(TIMEOUT) == 3
    assert future.done()
    assert future.exception() is None
    thread.join()
    assert type(client.async_("host", "total", x)) is moolink.Future  # now it is known
    assert client.sync("host", "total", x) == 0

    async def awaited() -> Any:
        return await client.async_("host", "queue", 1)

    queue = host.define_queue("queue")

    async def both() -> Any:
        task = asyncio.ensure_future(awaited())
        reply, (number,), _ = await queue
        reply(number + 1)
        return await task

    assert asyncio.run(asyncio.wait_for(both(), TIMEOUT)) == 2


def test_sync_and_callbacks_wait_for_a_definition(early: Peers, refused: threading.Event) -> None:
    host, client = early
    thread = defined_after(refused, host, "one", lambda: 1)
    assert client.sync("host", "one") == 1
    thread.join()
    got: list[Any] = []
    client.async_callback("host", "two", lambda *given: got.append(given))
    host.define("two", lambda: 2)
    until(lambda: bool(got), "the callback")
    assert got == [(2, None)]
    client.async_callback("host", "fails", lambda *given: got.append(given))
    host.define("fails", lambda: 1 / 0)
    until(lambda: len(got) == 2, "the callback")
    assert got[1][0] is None
    assert "division by zero" in got[1][1]  # moolib's errors are texts


def test_what_is_never_defined_fails(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "GRACE", 0.0)
    _, client = peers
    future = client.async_("host", "nothing")
    with pytest.raises(moolink.NoSuchFunction):
        future.result(TIMEOUT)
    assert isinstance(future.exception(), moolink.NoSuchFunction)
    assert future.cancel() is False


def test_an_early_call_can_be_cancelled(early: Peers) -> None:
    _, client = early
    future = client.async_("host", "nothing")
    assert future.cancel() is True
    with pytest.raises(RuntimeError):
        future.result(TIMEOUT)


def test_a_peer_that_is_closed_ends_its_early_calls(early: Peers, refused: threading.Event) -> None:
    _, client = early
    future = client.async_("host", "nothing")
    assert refused.wait(TIMEOUT)
    client.close()
    with pytest.raises(moolink.Closed):
        future.result(TIMEOUT)
    assert isinstance(future.exception(), moolink.Closed)


def test_a_call_that_is_cancelled_between_two_attempts_is_not_made_again(
    early: Peers, refused: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "_PAUSE", 0.5)
    host, client = early
    future = client.async_("host", "late")
    assert refused.wait(TIMEOUT)
    until(lambda: host.stats()["calls_running"] == 0, "the refusal")
    assert future.cancel()
    ran = threading.Event()
    host.define("late", ran.set)
    with pytest.raises(moolink.CancelledError):
        future.result(TIMEOUT)
    assert not ran.is_set()


def test_a_call_under_way_does_not_keep_its_peer_alive(peers: Peers) -> None:
    host, _ = peers
    host.define_queue("waits")
    gc.disable()
    try:
        client = moolib.Rpc("leaves", timeout=20)
        client.connect(host.addresses()[-1])
        future = client.async_("host", "waits")
        gone = weakref.ref(client)
        del client
        until(lambda: gone() is None, "the end of the peer")
        with pytest.raises(moolink.Closed):
            future.result(TIMEOUT)
    finally:
        gc.enable()


def test_a_call_under_way_says_in_a_forked_child_that_it_does_not_end_there(peers: Peers) -> None:
    host, client = peers
    queue = host.define_queue("waits")
    future = client.async_("host", "waits")

    def child() -> None:
        with pytest.raises(moolink.Closed, match="forked"):
            future.result(TIMEOUT)

    assert forks.exit_status(forks.start(child)) == 0
    queue.get(timeout=TIMEOUT)[0](1)
    assert future.result(TIMEOUT) == 1


def test_the_methods_of_a_subclass_do_not_keep_it_alive() -> None:
    class Own(moolib.Rpc):
        """A peer that serves its own methods."""

        def __init__(self) -> None:
            super().__init__("own")
            self.define("f", self.f)

        def f(self) -> int:
            """A handler."""
            return 1

    gc.disable()
    try:
        own = Own()
        assert own.sync("own", "f") == 1
        gone = weakref.ref(own)
        del own
        until(lambda: gone() is None, "the end of the peer")
    finally:
        gc.enable()


def test_a_first_call_can_lend(peers: Peers) -> None:
    host, client = peers
    host.define("total", lambda x: float(x.sum()))
    call = client.async_("host", "total", moolink.lend(torch.ones(3)))
    assert call.result() == 3
    assert call.released.result(TIMEOUT) is None


def test_a_peer_that_was_restarted_may_define_its_functions_again(
    early: Peers, refused: threading.Event
) -> None:
    host, client = early
    host.define("f", lambda: 1)
    assert client.sync("host", "f") == 1
    host.undefine(
        "f"
    )  # As with a new process of this name, the peer is there and the function not.
    thread = threading.Thread(target=lambda: refused.wait(TIMEOUT) and host.define("f", lambda: 2))
    thread.start()
    assert client.sync("host", "f") == 2
    thread.join()


def test_argument_errors_are_runtime_errors(peers: Peers) -> None:
    host, client = peers
    host.define("f", print)
    for kind, wrong in [
        (ValueError, lambda: host.define("f", print)),
        (TypeError, lambda: host.define("g", 1)),
        (ValueError, lambda: host.connect("nowhere")),
        (ValueError, lambda: host.set_transports(["pigeon"])),
        (TypeError, lambda: client.sync("host", "f", threading.Lock())),
        (ValueError, lambda: moolib.set_log_level("loud")),
        (ValueError, lambda: moolib.Batcher(0)),
        (TypeError, lambda: moolib.Group(1, "group")),
        (ValueError, lambda: moolib.Accumulator("model", [])),
        (TypeError, moolib.EnvRunner),
    ]:
        with pytest.raises(kind) as raised:
            wrong()
        assert kind is TypeError or isinstance(raised.value, RuntimeError)


def test_names() -> None:
    names = """Accumulator AllReduce Batcher Broker EnvPool EnvRunner EnvStepper EnvStepperFuture
        Future Group Queue Rpc RpcDeferredReturn RpcError create_uid set_log_level set_logging
        set_max_threads"""
    for name in names.split():
        assert getattr(moolib, name) is not None
        assert name in moolib.__all__
        assert name in dir(moolib)
    with pytest.raises(AttributeError, match="nothing"):
        moolib.nothing  # noqa: B018


def test_what_needs_no_torch_does_not_import_it() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); import moolib, moolib.broker; "
        "moolib.Rpc; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PROCESS_LIMIT)
