"""The processes of the storm (data_plane.py). Each checks its data; any of them may be killed.

The content of a tree identifies its version: all elements are the same number, and each tree has
the time at which it was published. So torn, old or misplaced data is detected.
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
from moolink.replay import Table
from moolink.weights import Shard, ShardedSubscriber, Weights
from moolink.weights import subscriber as subscribers

FAR_SIZE = 600_000  # float64 of a published tree: five chunks
RANKS = 3  # publishers of a sharded tree
TICK = 0.05  # seconds between versions of a sharded tree
MAX_LAG = 3
MARKS = 1_000_000  # numbers that one life may use
HELD = 3  # trees that a subscriber keeps and checks again


@dataclasses.dataclass
class Life:
    """One life of a process."""

    address: str  # of a peer that all others connect to
    name: str
    number: int  # counts lives over all processes
    events: Connection[Any, Any]

    def __post_init__(self) -> None:
        """Seeds the random choices with the number of the life."""
        self.random = random.Random(self.number)

    def peer(self) -> moolink.Rpc:
        """A peer with the process's name, connected to the storm's."""
        rpc = moolink.Rpc(self.name)
        rpc.connect(self.address)
        return rpc

    def say(self, event: str, *values: Any) -> None:
        """Sends an event to the storm."""
        self.events.send((event, *values))

    def rest(self, most: float) -> None:
        """Sleeps between two versions or items, as a program would compute."""
        time.sleep(self.random.uniform(0, most))


def main(
    role: Callable[..., None], life: Life, arguments: tuple[Any, ...], stay: Connection[Any, Any]
) -> None:
    """Runs a role until the process is killed, or until the storm closes its end of `stay`."""

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
    """Publishes trees. The publisher numbers the versions, in each life from the start."""
    published = moolink.Publisher(life.peer(), "w")
    for count in itertools.count():
        number = float(life.number * MARKS + count)
        layers = [np.full(FAR_SIZE, number), {"bias": np.full(7, number)}]
        published.publish({"layers": layers, "number": number, "at": time.monotonic()})
        life.rest(0.1)


def newer(one: moolink.Subscriber | ShardedSubscriber, version: int) -> Weights:
    """Waits for a version above `version`; the current version never goes below it."""
    while True:
        with contextlib.suppress(moolink.TimeoutError):
            return one.wait(version + 1, 0.1)
        now = one.latest()
        assert now is None or now.version >= version, f"from {version} back to {now.version}"


def number_of(tree: Any) -> float:
    """The number that all elements of a tree of `publisher` are."""
    first, last = tree["layers"]
    values = {one_value(first), one_value(last["bias"]), tree["number"]}
    assert len(values) == 1, f"a torn tree: {values}"
    return values.pop()


def subscriber(life: Life, host: str | None) -> None:
    """Checks each version. With `host`, claims to be on another host."""
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
    """Publishes a shard of a tree. Versions are ticks of a clock that all ranks share."""
    published = moolink.Publisher(life.peer(), "sharded")
    version = -1
    while True:
        version = max(version + 1, int(time.monotonic() / TICK))
        time.sleep(max(0.0, version * TICK - time.monotonic()))
        rows = content(version, 20 * index, 20 * (index + 1))
        tree = {"rows": Shard(rows, (20 * index, 0), (20 * RANKS, 500)), "whole": version}
        published.publish(tree, version)


def sharded_subscriber(life: Life) -> None:
    """Checks each version of rows from all ranks."""
    names = [f"rank-{index}" for index in range(RANKS)]
    one = ShardedSubscriber(
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
    """Serves until it is killed. The next life begins at version 0."""
    tree = {"w": np.zeros(1000), "at": 0.0}
    moolink.weights.ParameterServer(life.peer(), "p", tree, count_up, max_staleness=50)
    threading.Event().wait()


def parameter_client(life: Life) -> None:
    """Pushes ones: each parameter equals the version. Makes a new client after an error."""
    rpc = life.peer()
    while True:
        client = moolink.weights.ParameterClient(rpc, "p", "parameter-server")
        with client, contextlib.suppress(moolink.Error):
            push_and_pull(life, client)
        life.rest(0.1)


def push_and_pull(life: Life, client: moolink.weights.ParameterClient) -> None:
    """Pushes and pulls until the server is lost or a push is not applied."""
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
    """An item with an array of one number, its mark, which no other item has."""
    mark = life.number * MARKS + number
    return {"mark": np.full(size, mark, np.int64), "at": np.float64(time.monotonic())}


def say_taken(life: Life, marks: Any, at: Any) -> None:
    """Tells the storm which items were taken together."""
    items = [int(one_value(mark)) for mark in marks]
    life.say("taken", items, np.asarray(at, np.float64).reshape(-1).tolist())


def write_items(life: Life, put: Callable[[int], None], flush: Callable[[], None]) -> None:
    """Puts items, and tells the storm which are flushed. Some writers then kill themselves."""
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
    """Serves a table whose items are each sampled once, in order."""
    replay = moolink.Replay(Table.queue("items", 200))
    moolink.ReplayServer(life.peer(), replay)
    threading.Event().wait()


def sampler(life: Life) -> None:
    """Samples items from the replay."""
    client = moolink.ReplayClient(life.peer(), server="replay")
    while True:
        data = client.sample(3).data
        for marks in data["mark"]:
            assert marks[1, 0] == marks[0, 0] + 1, f"steps {marks[:, 0]} in one item"
        say_taken(life, [marks[1] for marks in data["mark"]], data["at"][:, 1])


def replay_writer(life: Life) -> None:
    """Makes items of two steps; an item has the number of its second step."""
    writer = moolink.ReplayClient(life.peer(), server="replay").writer(keep=2)
    writer.append(item(life, -1, 500))

    def put(number: int) -> None:
        writer.append(item(life, number, 500))
        mark, at = writer.history["mark"], writer.history["at"]
        writer.create_item({"mark": mark[-2:], "at": at[-2:]}, table="items")

    write_items(life, put, writer.flush)


def learner(life: Life) -> None:
    """Takes items of actors. Each batch raises the version of its weights."""
    queue = moolink.TrajectoryQueue(life.peer(), "unrolls", max_size=16)
    while True:
        batch = queue.get(3, max_lag=MAX_LAG, late="mask")
        lag = batch.version - batch.begin
        assert ((lag <= MAX_LAG) == batch.fresh).all(), f"{lag} versions old: {batch.fresh}"
        say_taken(life, batch.data["mark"], batch.data["at"])
        queue.version += 1


def actor(life: Life) -> None:
    """Puts items. They begin at the version at which the learner accepted the last one."""
    writer = moolink.TrajectoryWriter(life.peer(), "unrolls", "learner")

    def put(number: int) -> None:
        writer.put(item(life, number, 2000), begin=writer.learner_version or 0)

    write_items(life, put, writer.flush)
