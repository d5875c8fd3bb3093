"""The processes of the storm (data_plane.py). Each checks what it gets; any of them may be killed.

Content tells its version: all elements of a tree have one number, and trees have the time at which
they were published, so that what is torn, old or misplaced shows.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import moolink
from moolink import Shard
from moolink.replay import Table
from moolink.weights import subscriber as subscribers

FAR_SIZE = 600_000  # float64 of a published tree: five chunks
RANKS = 3  # publishers of a sharded tree
TICK = 0.05  # seconds between versions of a sharded tree
MAX_LAG = 3
MARKS = 1_000_000  # numbers of a life
HELD = 3  # trees that a subscriber keeps and looks at again


@dataclasses.dataclass
class Life:
    """One life of a process."""

    address: str  # of a peer that knows all others
    name: str
    number: int  # rises from life to life, over all processes
    events: Connection[Any, Any]

    def __post_init__(self) -> None:
        """Each life makes other choices."""
        self.random = random.Random(self.number)

    def peer(self) -> moolink.Rpc:
        """A peer of the process's name."""
        rpc = moolink.Rpc(self.name)
        rpc.connect(self.address)
        return rpc

    def say(self, event: str, *values: Any) -> None:
        """Tells the storm."""
        self.events.send((event, *values))

    def rest(self, most: float) -> None:
        """The pace at which a program would publish or act."""
        time.sleep(self.random.uniform(0, most))


def main(
    role: Callable[..., None], life: Life, arguments: tuple[Any, ...], stay: Connection[Any, Any]
) -> None:
    """Lives until it is killed, or until the storm ends: then the other end of `stay` is closed."""

    def wait_for_the_end() -> None:
        with contextlib.suppress(EOFError, OSError):
            stay.recv()
        os._exit(0)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        role(life, *arguments)
    except BaseException:  # noqa: BLE001 - the storm raises it
        life.say("error", traceback.format_exc())


def one_value(array: Any) -> float:
    """The value that all elements of an array have."""
    values = np.unique(np.asarray(array))
    assert len(values) == 1, f"a torn array: {values[:5]} in an array of {np.shape(array)}"
    return float(values[0])


# Weights


def publisher(life: Life) -> None:
    """Versions are numbered by the publisher, which starts anew in each life."""
    published = moolink.Publisher(life.peer(), "w")
    for count in itertools.count():
        number = float(life.number * MARKS + count)
        layers = [np.full(FAR_SIZE, number), {"bias": np.full(7, number)}]
        published.publish({"layers": layers, "number": number, "at": time.monotonic()})
        life.rest(0.1)


def newer(one: moolink.Subscriber | moolink.ShardedSubscriber, version: int) -> moolink.Weights:
    """Waits for a version above; the current one never goes below."""
    while True:
        with contextlib.suppress(moolink.TimeoutError):
            return one.wait(version + 1, 0.1)
        now = one.latest()
        assert now is None or now.version >= version, f"from {version} back to {now.version}"


def number_of(tree: Any) -> float:
    """The one number in a tree of `publisher`."""
    first, last = tree["layers"]
    values = {one_value(first), one_value(last["bias"]), tree["number"]}
    assert len(values) == 1, f"a torn tree: {values}"
    return values.pop()


def subscriber(life: Life, host: str | None) -> None:
    """Takes itself for a process of another host, if `host` is given."""
    if host is not None:
        subscribers.host_key = lambda: host  # type: ignore[attr-defined]
    one = moolink.Subscriber(life.peer(), "w", "publisher")
    version, number = -1, -1.0
    held: collections.deque[tuple[Any, float]] = collections.deque(maxlen=HELD)
    while True:
        weights = newer(one, version)
        found = number_of(weights.tree)
        assert found > number, f"after content {number} of {version} came the older {found}"
        version, number = weights.version, found
        held.append((weights.tree, number))
        for tree, then in held:
            assert number_of(tree) == then, "a tree has changed after it was given out"
        life.say("version", weights.tree["at"])


def content(version: int, first: int, stop: int) -> Any:
    """Rows of the sharded tree's array."""
    rows = np.arange(first, stop, dtype=np.int64)[:, None]
    return version * 1000 + np.broadcast_to(rows, (stop - first, 500))


def rank(life: Life, index: int) -> None:
    """Holds a part of a tree whose versions are ticks of the clock that all ranks share."""
    published = moolink.Publisher(life.peer(), "sharded")
    version = -1
    while True:
        version = max(version + 1, int(time.monotonic() / TICK))
        time.sleep(max(0.0, version * TICK - time.monotonic()))
        rows = content(version, 20 * index, 20 * (index + 1))
        tree = {"rows": Shard(rows, (20 * index, 0), (20 * RANKS, 500)), "whole": version}
        published.publish(tree, version)


def sharded_subscriber(life: Life) -> None:
    """Wants rows of all ranks."""
    names = [f"rank-{index}" for index in range(RANKS)]
    one = moolink.ShardedSubscriber(
        life.peer(), "sharded", names, lambda path, shape: (slice(5, 57),) if shape else None
    )
    version = -1
    while True:
        weights = newer(one, version)
        version = weights.version
        assert weights.tree["whole"] == version, f"{weights.tree['whole']} in {version}"
        np.testing.assert_array_equal(weights.tree["rows"], content(version, 5, 57))
        life.say("version", version * TICK)


def count_up(parameters: Any, pushed: Any) -> Any:
    """The update of the parameter server."""
    parameters["w"] += pushed["one"]
    parameters["at"] = pushed["at"]
    return parameters


def parameter_server(life: Life) -> None:
    """Serves until it is killed; its successor begins at version 0."""
    tree = {"w": np.zeros(1000), "at": 0.0}
    moolink.ParameterServer(life.peer(), "p", tree, count_up, max_staleness=50)
    threading.Event().wait()


def parameter_client(life: Life) -> None:
    """Pushes ones: the parameters are their version's number. Begins anew at a new server."""
    rpc = life.peer()
    while True:
        client = moolink.ParameterClient(rpc, "p", "parameter-server")
        with client, contextlib.suppress(moolink.Error):
            push_and_pull(life, client)
        life.rest(0.1)


def push_and_pull(life: Life, client: moolink.ParameterClient) -> None:
    """Until the server is lost, or is another one that has not made these versions."""
    version = -1
    made: int | None = 0
    while made is not None:
        weights = client.pull(made, timeout=5.0)
        assert weights.version >= max(made, version), f"{version}, then {weights.version}"
        version = weights.version
        assert one_value(weights.tree["w"]) == version, f"{weights.tree['w'][:3]} in {version}"
        life.say("version", weights.tree["at"])
        pushed = {"one": np.ones(1000), "at": time.monotonic()}
        made = client.push(pushed, weights.version)
        life.rest(0.1)


# Items. Each has its writer's life, a number and the time at which it was made.


def item(life: Life, number: int, size: int) -> dict[str, Any]:
    """An array whose elements are all the same, to be told from others'."""
    mark = life.number * MARKS + number
    return {"mark": np.full(size, mark, np.int64), "at": np.float64(time.monotonic())}


def say_taken(life: Life, marks: Any, at: Any) -> None:
    """Tells which items were taken together."""
    items = [int(one_value(mark)) for mark in marks]
    life.say("taken", items, np.asarray(at, np.float64).reshape(-1).tolist())


def write_items(life: Life, put: Callable[[int], None], flush: Callable[[], None]) -> None:
    """Puts items, and tells of those that were accepted since a moment; some die right then."""
    first, since = 0, time.monotonic()
    for number in itertools.count():
        put(number)
        if life.random.random() < 0.2:
            flush()
            base = life.number * MARKS
            life.say("flushed", base + first, base + number, since)
            if life.random.random() < 0.03:
                os.kill(os.getpid(), signal.SIGKILL)
            first, since = number + 1, time.monotonic()
        life.rest(0.04)


def replay_server(life: Life) -> None:
    """Each item is sampled once, in order."""
    replay = moolink.Replay(Table.queue("items", 200))
    moolink.ReplayServer(life.peer(), replay)
    threading.Event().wait()


def sampler(life: Life) -> None:
    """Takes items out of the replay."""
    client = moolink.ReplayClient(life.peer(), "replay")
    while True:
        data = client.sample(3).data
        for marks in data["mark"]:
            assert marks[1, 0] == marks[0, 0] + 1, f"steps {marks[:, 0]} in one item"
        say_taken(life, [marks[1] for marks in data["mark"]], data["at"][:, 1])


def replay_writer(life: Life) -> None:
    """Makes an item of the last two steps; it has the number of the second one."""
    writer = moolink.ReplayClient(life.peer(), "replay").writer(keep=2)
    writer.append(item(life, -1, 500))

    def put(number: int) -> None:
        writer.append(item(life, number, 500))
        mark, at = writer.history["mark"], writer.history["at"]
        writer.create_item({"mark": mark[-2:], "at": at[-2:]}, table="items")

    write_items(life, put, writer.flush)


def learner(life: Life) -> None:
    """Takes items of actors; its weights get a version with each batch."""
    queue = moolink.TrajectoryQueue(life.peer(), "unrolls", max_size=16)
    while True:
        batch = queue.get(3, max_lag=MAX_LAG, late="mask")
        lag = batch.version - batch.begin
        assert ((lag <= MAX_LAG) == batch.fresh).all(), f"{lag} versions old: {batch.fresh}"
        say_taken(life, batch.data["mark"], batch.data["at"])
        queue.version += 1


def actor(life: Life) -> None:
    """Its weights are of the version that the learner had when it accepted the last item."""
    writer = moolink.TrajectoryWriter(life.peer(), "unrolls", "learner")

    def put(number: int) -> None:
        writer.put(item(life, number, 2000), begin=writer.learner_version or 0)

    write_items(life, put, writer.flush)
