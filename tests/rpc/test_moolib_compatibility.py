"""moolib's calls, one test for each: what a script written for it relies on.

Where moolib aborted, hung or lost something, the test shows what happens instead.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import moolink
from moolink.compat import moolib
from tests.waiting import TIMEOUT, until

Peers = tuple[moolink.Rpc, moolink.Rpc]


@pytest.fixture
def peers() -> Iterator[tuple[moolink.Rpc, moolink.Rpc]]:
    """A host and a client, made and connected as moolib's examples do it."""
    host, client = moolink.Rpc(), moolink.Rpc()
    host.set_name("host")
    client.set_name("client")
    for rpc in host, client:
        rpc.set_timeout(20)
    client.connect(host.listen("127.0.0.1:0")[0])
    yield host, client
    client.close()
    host.close()


# --- the module


def test_names() -> None:
    names = """Accumulator AllReduce Batcher Broker EnvPool EnvStepper EnvStepperFuture Future Group
        Queue Rpc RpcDeferredReturn RpcError create_uid set_log_level set_logging set_max_threads"""
    for name in names.split():
        assert getattr(moolib, name) is not None
        assert name in moolib.__all__


def test_create_uid() -> None:
    assert re.fullmatch("[0-9a-f]{16}", moolib.create_uid())
    assert moolib.create_uid() != moolib.create_uid()


def test_logging() -> None:
    for level in ("none", "error", "info", "verbose", "debug", logging.INFO):
        moolink.set_log_level(level)
    with pytest.raises(ValueError, match="log level"):  # moolib: aborts
        moolink.set_log_level("loud")
    logging.getLogger("moolink").setLevel(logging.NOTSET)


def test_set_logging(peers: Peers) -> None:
    class Module:
        """A logging-like module, as moolib's scripts give it."""

        records: list[str] = []

        @classmethod
        def getLogger(cls, name: str | None = None) -> logging.Logger:
            logger = logging.Logger(f"another {name}")
            logger.addFilter(lambda record: cls.records.append(record.getMessage()) is not None)
            return logger

    host, client = peers

    def reply_and_raise(reply: moolink.rpc.RpcDeferredReturn) -> None:
        reply(1)
        raise ValueError("after the reply")

    host.define_deferred("f", reply_and_raise)
    moolink.set_logging(Module)
    try:
        assert client.sync("host", "f") == 1
        until(lambda: bool(Module.records), "the line")
    finally:
        moolink.set_logging(logging)
    assert "'f' raised ValueError('after the reply')" in Module.records[0]


def test_errors_are_runtime_errors(peers: Peers) -> None:
    _, client = peers
    with pytest.raises(RuntimeError):
        client.sync("host", "nothing")
    error = client.async_("host", "nothing")
    error.wait()
    assert isinstance(error.exception(), moolink.Error)
    assert "nothing" in str(error.exception())


# --- Rpc


def test_rpc_takes_nothing() -> None:
    with moolink.Rpc() as rpc:
        assert re.fullmatch("[0-9a-f]{32}", rpc.get_name())
        assert rpc.get_timeout() == 120


def test_set_name_and_get_name(peers: Peers) -> None:
    host, client = peers
    host.define("name", lambda: host.get_name())
    assert client.sync("host", "name") == "host"


def test_set_timeout_bounds_calls_not_handlers(peers: Peers) -> None:
    host, client = peers
    host.set_timeout(0.05)  # moolib: the reply of a handler that lasts longer is dropped
    host.define("slow", lambda: time.sleep(0.2))
    assert client.sync("host", "slow") is None
    client.set_timeout(0.05)
    with pytest.raises(moolink.TimeoutError, match="slow"):
        client.sync("host", "slow")


@pytest.mark.parametrize("names", [["ipc"], ["tcp/ip"], ["shared memory", "TCP"], ["ipc", "tcp"]])
def test_set_transports(names: list[str]) -> None:
    with moolink.Rpc() as host, moolink.Rpc("client", timeout=20) as client:
        host.set_name("host")
        for rpc in host, client:
            rpc.set_transports(names)
        host.define("f", lambda: 1)
        address = f"ipc://{moolib.create_uid()}" if names == ["ipc"] else "127.0.0.1:0"
        client.connect(host.listen(address)[0])
        assert client.sync("host", "f") == 1


def test_infiniband_is_refused_by_its_name() -> None:
    with moolink.Rpc() as rpc, pytest.raises(ValueError, match=r"'infiniband' .* leave it out"):
        rpc.set_transports(["infiniband", "tcp/ip"])


def test_a_transport_that_is_off_cannot_be_used() -> None:
    with moolink.Rpc() as rpc:
        rpc.set_transports(["ipc"])
        with pytest.raises(ValueError, match="no enabled transport"):
            rpc.connect("127.0.0.1:4431")


def free_port() -> int:
    with moolink.Rpc() as rpc:
        return int(rpc.listen("127.0.0.1:0")[0].rsplit(":", 1)[1])


@pytest.mark.parametrize(
    ("listened", "dialled"),
    [
        ("127.0.0.1:{}", "127.0.0.1:{}"),
        ("tcp://127.0.0.1:{}", "tcp://127.0.0.1:{}"),
        ("localhost:{}", "localhost:{}"),
        (":{}", "127.0.0.1:{}"),
        ("*:{}", "localhost:{}"),
        ("tcp://*:{}", "tcp://127.0.0.1:{}"),
        ("{}", "127.0.0.1:{}"),
        ("0.0.0.0:{}", "127.0.0.1:{}"),
        ("[::1]:{}", "[::1]:{}"),
        (":{}", "tcp://[::1]:{}"),
    ],
)
def test_addresses(listened: str, dialled: str) -> None:
    port = free_port()
    with moolink.Rpc("host") as host, moolink.Rpc("client", timeout=20) as client:
        for rpc in host, client:
            rpc.set_transports(["tcp"])
        host.define("f", lambda: 1)
        host.listen(listened.format(port))
        client.connect(dialled.format(port))
        assert client.sync("host", "f") == 1


def test_ipc_addresses() -> None:
    for address in (f"ipc://{moolib.create_uid()}", f"ipc:///tmp/{moolib.create_uid()}/socket"):
        with moolink.Rpc("host") as host, moolink.Rpc("client", timeout=20) as client:
            host.define("f", lambda: 1)
            host.listen(address)
            client.connect(address)
            assert client.sync("host", "f") == 1
            assert client.explain("host")["path"] == "shm"
            with pytest.raises(moolink.Error, match="another socket of this host listens there"):
                client.listen(address)
    with moolink.Rpc() as rpc, pytest.raises(ValueError, match="has no name"):
        rpc.listen("ipc://")


def test_listen_tells_the_port() -> None:
    with moolink.Rpc() as rpc:
        (address,) = rpc.listen("127.0.0.1:0")
        assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+", address)
        with moolink.Rpc() as other, pytest.raises(moolink.Error, match="in use"):
            other.listen(address)  # moolib: both get some of the connections


@pytest.mark.parametrize("address", ["203.0.113.7:0", "no.such.host.invalid:0"])
def test_listen_where_there_is_nothing_raises(address: str) -> None:
    with moolink.Rpc() as rpc, pytest.raises(RuntimeError):
        rpc.listen(address)


def test_connect_returns_at_once_and_keeps_trying() -> None:
    port = free_port()
    with moolink.Rpc("client", timeout=20) as client, moolink.Rpc("host") as host:
        client.connect(f"127.0.0.1:{port}")
        future = client.async_("host", "f")
        host.define("f", lambda: "met")
        host.listen(f"127.0.0.1:{port}")
        assert future.result() == "met"


def test_define_and_sync(peers: Peers) -> None:
    host, client = peers
    host.define("linear", torch.nn.functional.linear)
    x, w = torch.randn(4, 3), torch.randn(2, 3)
    torch.testing.assert_close(client.sync("host", "linear", x, w), x @ w.T)
    host.define("kwargs", lambda *args, **kwargs: (args, kwargs))
    assert client.sync("host", "kwargs", 1, b=[2]) == ((1,), {"b": [2]})
    with pytest.raises(ValueError, match="defined already"):
        host.define("linear", print)
    with pytest.raises(TypeError):  # moolib: accepted and ignored
        host.define("batched", print, batchsize=3)  # type: ignore[call-arg]


def test_a_handler_that_raises(peers: Peers) -> None:
    host, client = peers
    host.define("fail", lambda: 1 / 0)  # moolib: the host aborts
    with pytest.raises(RuntimeError, match="division by zero"):
        client.sync("host", "fail")


def test_define_batched_by_position(peers: Peers) -> None:
    host, client = peers
    host.define("double", lambda x: 2 * x, 3, "cpu")
    futures = [client.async_("host", "double", torch.full((2,), i)) for i in range(3)]
    assert [f.result().tolist() for f in futures] == [[0, 0], [2, 2], [4, 4]]


def test_define_deferred(peers: Peers) -> None:
    host, client = peers
    given: list[moolink.rpc.RpcDeferredReturn] = []
    host.define_deferred("later", lambda callback, x: given.append(callback))
    future = client.async_("host", "later", 1)
    until(lambda: len(given) == 1, "the call")
    threading.Thread(target=lambda: given[0](torch.ones(2))).start()
    assert future.result().tolist() == [1, 1]


def test_define_queue(peers: Peers) -> None:
    host, client = peers
    queue = host.define_queue("q")
    assert isinstance(queue, moolink.rpc.Queue)

    async def serve() -> None:
        return_callback, args, kwargs = await queue
        assert type(args) is tuple
        assert type(kwargs) is dict
        return_callback(args[0] + kwargs["y"])

    future = client.async_("host", "q", 1, y=2)
    asyncio.run(asyncio.wait_for(serve(), TIMEOUT))
    assert future.result() == 3


def test_define_queue_batched(peers: Peers) -> None:
    host, client = peers
    static = host.define_queue("static", batch_size=2)
    dynamic = host.define_queue("dynamic", batch_size=10, dynamic_batching=True)
    positional = host.define_queue("positional", 10, "cpu", True)

    async def serve(queue: moolink.rpc.Queue) -> tuple[int, ...]:
        return_callback, (x, label), _ = await queue
        return_callback((x * 2, tuple(label)))
        return tuple(x.shape)

    for name, queue in [("static", static), ("dynamic", dynamic), ("positional", positional)]:
        futures = [client.async_("host", name, torch.full((3,), i), str(i)) for i in range(2)]
        until(lambda queue=queue: queue.size() == 2, "the calls")
        assert asyncio.run(asyncio.wait_for(serve(queue), TIMEOUT)) == (2, 3)
        for i, future in enumerate(futures):
            doubled, label = future.result()
            assert doubled.tolist() == [2 * i] * 3
            assert label == str(i)  # moolib, static: the first call's for all


def test_undefine(peers: Peers) -> None:
    host, client = peers
    started = threading.Event()

    def slow() -> int:
        started.set()
        time.sleep(0.05)  # moolib: undefine hangs while a handler runs
        return 1

    host.define("slow", slow)
    future = client.async_("host", "slow")
    assert started.wait(TIMEOUT)
    host.undefine("slow")
    assert future.result() == 1
    with pytest.raises(RuntimeError, match="slow"):
        client.sync("host", "slow")
    host.define("slow", lambda: 2)
    assert client.sync("host", "slow") == 2


def test_async_callback(peers: Peers) -> None:
    host, client = peers
    host.define("f", lambda x: 1 / x)
    got: list[tuple[object, object]] = []
    for x in (2, 0):
        client.async_callback("host", "f", lambda result, error: got.append((result, error)), x)
    until(lambda: len(got) == 2, "the callbacks")
    good, bad = sorted(got, key=lambda entry: entry[1] is not None)
    assert good == (0.5, None)
    assert bad[0] is None
    assert "division by zero" in str(bad[1])


def test_calls_of_oneself(peers: Peers) -> None:
    host, _ = peers
    host.define("f", lambda: 1)
    assert host.sync("host", "f") == 1  # moolib: raises


def test_debug_info(capsys: pytest.CaptureFixture[str]) -> None:
    with moolib.Rpc("host") as host, moolib.Rpc("client") as client:
        client.connect(host.listen("127.0.0.1:0")[0])
        host.define("f", lambda: 1)
        client.sync("host", "f")
        assert client.debug_info() is None
    printed = capsys.readouterr().out
    assert "Rpc 'client'" in printed
    assert "calls_sent 1" in printed
    assert "name host" in printed


def test_the_name_users_know(peers: Peers) -> None:
    import pickle

    host, client = peers
    assert repr(host).startswith("<moolink.Rpc 'host' at ")
    assert inspect.getmodule(moolink.Rpc) is moolink
    assert "unique name" in (moolink.Rpc.__doc__ or "")
    for fails in (lambda: pickle.dumps(host), lambda: client.async_("host", "f", host)):
        with pytest.raises(TypeError, match=r"moolink\.Rpc"):
            fails()


def test_brokers_and_groups_take_it() -> None:
    with (
        moolink.Rpc("broker") as rpc,
        moolib.Broker(rpc) as broker,
        moolink.Rpc("member") as member,
        moolib.Group(member, "group") as group,
    ):
        broker.update()
        assert group.sync_id() == group.epoch()
        member.connect(rpc.listen("127.0.0.1:0")[0])
        until(lambda: group.update() or bool(group.members()), "the group")
        assert group.members() == ["member"]


def test_calls_to_many_peers() -> None:
    names = [f"peer {i}" for i in range(3)]
    others = [moolink.Rpc(name) for name in names]
    with moolink.Rpc("caller", timeout=20) as caller:
        caller.define("total", lambda x: ("caller", x.sum().item(), x.fill(7)))
        for rpc in others:
            rpc.define("total", lambda x, rpc=rpc: (rpc.get_name(), x.sum().item(), x.fill(7)))
            caller.connect(rpc.listen("127.0.0.1:0")[0])
        x = np.ones(300_000, np.int32)
        asked = ["caller", *names, "caller"]
        futures = caller.async_many(asked, "total", x)
        assert list(futures) == ["caller", *names]
        for name, future in futures.items():
            assert future.result() == (name, 300_000, None)
        others[0].undefine("total")
        futures = caller.async_many(names, "total", x=x)
        with pytest.raises(moolink.NoSuchFunction):
            futures[names[0]].result()
        assert futures[names[1]].result()[0] == names[1]
        assert caller.async_many([], "total") == {}
        with pytest.raises(TypeError):
            caller.async_many("peer 0", "total")  # type: ignore[arg-type]
    for rpc in others:
        rpc.close()


# --- Future


def test_future(peers: Peers) -> None:
    host, client = peers
    release = threading.Event()
    host.define("wait", lambda: release.wait(TIMEOUT))
    future = client.async_("host", "wait")
    assert isinstance(future, moolink.Future)
    assert not future.done()
    assert future.exception() is None
    with pytest.raises(RuntimeError, match="not done within"):
        future.result(0.01)
    assert future.wait(0.01) is False  # moolib: raises
    release.set()
    assert future.result() is True
    assert future.result() is True  # moolib: raises
    assert future.done()

    async def twice() -> list[object]:
        async def one() -> object:
            return await future

        return await asyncio.gather(one(), one())  # moolib: the first waits for ever

    assert asyncio.run(twice()) == [True, True]


def test_future_cancel(peers: Peers) -> None:
    host, client = peers
    release = threading.Event()
    host.define("wait", lambda: release.wait(TIMEOUT))
    future = client.async_("host", "wait")
    future.cancel()
    release.set()
    with pytest.raises(RuntimeError, match="cancelled"):
        future.result()
    host.define("later", lambda: 1)
    assert client.sync("host", "later") == 1
    assert isinstance(future.exception(), moolink.CancelledError)  # moolib: may succeed after all


# --- Queue


def test_queue() -> None:
    async def main() -> None:
        queue = moolink.rpc.Queue()
        queue.enqueue(1)
        queue.enqueue("two")
        assert await queue == 1
        assert await queue == "two"
        cancelled = asyncio.ensure_future(queue)
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        queue.enqueue(3)
        assert await queue == 3  # moolib: eaten by the cancelled one

    asyncio.run(main())


# --- Batcher


def test_batcher() -> None:
    batcher = moolink.Batcher(2, "cpu", 0)
    assert batcher.empty()
    for i in range(2):
        batcher.stack({"x": torch.full((3,), i), "y": (torch.tensor(i), [torch.ones(1)])})
    assert batcher.size() == 1
    batch = batcher.get()
    assert batch["x"].tolist() == [[0, 0, 0], [1, 1, 1]]
    assert batch["y"][0].tolist() == [0, 1]
    batcher = moolink.Batcher(size=4, device="cpu", dim=1)
    batcher.cat(torch.arange(12).reshape(2, 6))
    assert batcher.get().tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert batcher.empty()

    async def main() -> None:
        batcher.cat(torch.zeros(2, 2))
        assert (await batcher).shape == (2, 4)

    with pytest.raises(ValueError):
        batcher.stack(torch.zeros(2))
    batcher = moolink.Batcher(size=4, dim=1)
    batcher.cat(torch.zeros(2, 2))
    asyncio.run(main())
