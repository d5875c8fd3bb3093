"""Each wait for a server that has ended ends by a time limit: its own, or the Rpc's."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import moolink
from moolink.rpc import naming
from tests import processes, waiting

LIMIT = 0.5  # seconds, of the Rpc
SHORT = 0.2  # seconds, of a call
HANGS = 60.0  # seconds after which a wait counts as one without an end
ONE = {"x": np.ones((1, 2), np.float32)}
STEP = {"x": np.ones(2, np.float32)}


class Clients:
    """A client of each of a server's objects, used once while the server was there."""

    def __init__(self, address: str) -> None:
        self.rpc = moolink.Rpc("client")
        self.rpc.connect(address)
        assert self.rpc.sync("server", "answers") == 1
        self.replay = moolink.ReplayClient(self.rpc, server="server")
        self.replay.extend(ONE)
        self.writers = [self._writer() for _ in range(6)]
        self.batches = self.replay.batches(1, prefetch=1)
        next(self.batches)
        self.queued = [self._queued() for _ in range(3)]
        self.weights = moolink.Subscriber(self.rpc, "weights", "server")
        self.sharded = moolink.weights.ShardedSubscriber(self.rpc, "weights", ["server"])
        self.parameters = moolink.weights.ParameterClient(self.rpc, "parameters", "server")
        self.policy = moolink.InferenceClient(self.rpc, "policy", "server")
        self.policies = moolink.InferenceClient(self.rpc, "policy", ["server", "second"])
        for one in (self.weights, self.sharded):
            one.wait(0, HANGS)
        self.parameters.pull(0, HANGS)
        self.policy.infer(ONE, timeout=HANGS)
        self.rpc.set_timeout(LIMIT)

    def _writer(self) -> moolink.replay.Writer:
        writer = self.replay.writer(keep=1, chunk=1)
        add(writer)
        writer.flush(HANGS)
        return writer

    def _queued(self) -> moolink.TrajectoryWriter:
        return moolink.TrajectoryWriter(self.rpc, "unroll", "server", ahead=1)


def add(writer: moolink.replay.Writer, timeout: float | None = None) -> None:
    writer.append(STEP)
    writer.create_item({"x": writer.history["x"][-1]}, timeout=timeout)


def add_many(writer: moolink.replay.Writer, timeout: float | None) -> None:
    for _ in range(20):
        add(writer, timeout)


def in_a_with(writer: moolink.replay.Writer) -> None:
    with writer:
        add(writer)


def put(writer: moolink.TrajectoryWriter, timeout: float | None) -> None:
    for _ in range(3):  # the first may find room, the second waits
        writer.put(STEP, 0, timeout=timeout)


WAITS: dict[str, Callable[[Clients], Any]] = {
    "Rpc.sync": lambda c: c.rpc.sync("server", "answers"),
    "Future.result": lambda c: c.rpc.async_("server", "answers").result(),
    "Rpc.sync of a queue": lambda c: c.rpc.sync("server", "queue"),
    "ReplayClient.sample(timeout)": lambda c: c.replay.sample(1, timeout=SHORT),
    "ReplayClient.sample": lambda c: c.replay.sample(1),
    "ReplayClient.batches": lambda c: [next(c.batches) for _ in range(9)],
    "ReplayClient.insert(timeout)": lambda c: c.replay.insert(STEP, timeout=SHORT),
    "ReplayClient.insert": lambda c: c.replay.insert(STEP),
    "ReplayClient.extend": lambda c: c.replay.extend(ONE),
    "ReplayClient.update_priorities": lambda c: c.replay.update_priorities([1], [1.0]),
    "ReplayClient.remove": lambda c: c.replay.remove([1]),
    "ReplayClient.reset": lambda c: c.replay.reset(),
    "ReplayClient.tables": lambda c: c.replay.tables(),
    "ReplayClient.stats": lambda c: c.replay.stats(),
    "Writer.flush(timeout)": lambda c: (add(c.writers[0]), c.writers[0].flush(SHORT)),
    "Writer.flush": lambda c: (add(c.writers[1]), c.writers[1].flush()),
    "Writer.close(timeout)": lambda c: (add(c.writers[2]), c.writers[2].close(SHORT)),
    "with Writer": lambda c: in_a_with(c.writers[3]),
    "Writer.create_item(timeout)": lambda c: add_many(c.writers[4], SHORT),
    "Writer.append": lambda c: add_many(c.writers[5], None),
    "TrajectoryWriter.put(timeout)": lambda c: put(c.queued[0], SHORT),
    "TrajectoryWriter.put": lambda c: put(c.queued[1], None),
    "TrajectoryWriter.flush": lambda c: (c.queued[2].put(STEP, 0), c.queued[2].flush()),
    "Subscriber.wait(timeout)": lambda c: c.weights.wait(9, SHORT),
    "Subscriber.wait": lambda c: c.weights.wait(9),
    "ShardedSubscriber.wait(timeout)": lambda c: c.sharded.wait(9, SHORT),
    "ShardedSubscriber.wait": lambda c: c.sharded.wait(9),
    "ParameterClient.pull(timeout)": lambda c: c.parameters.pull(9, SHORT),
    "ParameterClient.pull": lambda c: c.parameters.pull(9),
    "ParameterClient.push": lambda c: c.parameters.push({"w": np.ones(2)}, 0),
    "InferenceClient.infer(timeout)": lambda c: c.policies.infer(ONE, timeout=SHORT),
    "InferenceClient.infer": lambda c: c.policy.infer(ONE),
}
LOSES = {"TrajectoryWriter.put(timeout)", "TrajectoryWriter.put", "TrajectoryWriter.flush"}
"""Those in which an item that is lost with a learner is counted and no error."""
FOLLOWS = {"Subscriber.wait", "ShardedSubscriber.wait", "ParameterClient.pull"}
"""Those that wait for a publisher whose peer is connected."""


@contextlib.contextmanager
def ended(how: str) -> Iterator[Clients]:
    """Clients of a server that has ended: by a signal, by closing its peer, or its objects."""
    with processes.killed_at_the_end() as started:
        server = processes.start_python("-m", "tests.faults.server_that_ends")
        started.append(server)
        assert server.stdin is not None
        assert server.stdout is not None
        clients = Clients(server.stdout.readline().strip())
        if how == "killed":
            server.kill()
        else:
            server.stdin.write(f"{how}\n")
            server.stdin.flush()
        if how == "objects":
            assert server.stdout.readline() == "closed\n"
        else:
            server.wait()
            # Items that a call carries at this moment may be lost, and are counted then.
            waiting.until(lambda: not naming.connected(clients.rpc, ["server"]), "the loss")
        yield clients
        clients.rpc.close()


def outcome(wait: Callable[[Clients], Any], clients: Clients) -> concurrent.futures.Future[Any]:
    """The outcome of a wait on a thread of its own, which a wait without an end leaves behind."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(wait(clients))
        except BaseException as raised:  # noqa: BLE001 - it is the outcome
            future.set_exception(raised)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize("how", ["killed", "peer", "objects"])
def test_a_wait_for_a_server_that_has_ended_ends_by_a_time_limit(how: str) -> None:
    with ended(how) as clients:
        waits = {
            name: outcome(wait, clients)
            for name, wait in WAITS.items()
            if not (how == "objects" and name in FOLLOWS)
        }
        _, left = concurrent.futures.wait(waits.values(), HANGS)
        assert not left, [name for name, future in waits.items() if future in left]
        expected = (moolink.TimeoutError, moolink.PeerLost, moolink.NoSuchFunction)
        for name, future in waits.items():
            if name not in LOSES or future.exception() is not None:
                assert isinstance(future.exception(), expected), (name, future)


def test_an_error_of_a_writer_tells_how_many_items_were_not_delivered() -> None:
    with ended("killed") as clients:
        writer = clients.writers[0]
        add(writer)
        text = r"1 items were not delivered to the replay 'replay' at 'server' within .*flush\(\)"
        for end in (writer.flush, writer.close):
            with pytest.raises(moolink.TimeoutError, match=text):
                end(SHORT)
        with pytest.raises(ArithmeticError), clients.writers[1] as other:
            add(other)
            raise ArithmeticError


def test_items_that_were_not_delivered_in_time_are_when_there_is_room() -> None:
    table = moolink.replay.Table("t", 1, remover=None, max_times_sampled=1)
    with (
        moolink.Rpc("server") as rpc,
        moolink.Rpc("client") as peer,
        moolink.Replay(table) as replay,
        moolink.ReplayServer(rpc, replay),
    ):
        peer.connect(rpc.listen("127.0.0.1:0")[0])
        client = moolink.ReplayClient(peer, server="server")
        with concurrent.futures.ThreadPoolExecutor() as threads:
            with client.writer(keep=1, chunk=4) as writer:
                for _ in range(3):
                    add(writer)
                with pytest.raises(moolink.TimeoutError, match="items were not delivered"):
                    writer.flush(SHORT)
                batches = threads.submit(lambda: [client.sample(1, timeout=HANGS) for _ in "123"])
            assert [len(batch) for batch in batches.result()] == [1, 1, 1]
